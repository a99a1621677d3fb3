"""Joiner jobs come and go while a run goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from sweeps import ROOT, Member, hurry, launch_one, paced, sbatch
from test_interruptions import processes

from psrl.coordinator.records import Occupy, Reserve

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]


def join(cluster: Any, member: Member, instances: int) -> str:
    """A joiner job on a node of its own; returns its id."""
    options = ("--partition=all", "--nodelist=n2", f"--output={member.dir.path}/logs/joiner-%j.out")
    script = ROOT / "slurm" / "join_rollout.sbatch"
    return sbatch(cluster, script, str(member.dir.path), "--instances", str(instances), options=options)


def at_work(cluster: Any, member: Member) -> str:
    """A joiner job of two instances, once both have made groups; its id."""
    job = join(cluster, member, instances=2)
    member.until(lambda: len(served(member, job)) == 2, "both joined instances have made groups")
    return job


def served(member: Member, job: str) -> set[str]:
    """Instances of the joiner job that finished a group which they had been given."""
    records = member.records()  # read once: what was reserved after a first look may be occupied at a second
    instance = {r.group: r.instance for r in records if isinstance(r, Reserve)}
    occupied = {instance[r.group] for r in records if isinstance(r, Occupy)}
    return {name for name in occupied if name.startswith(f"instance-join-{job}-")}


def test_joiner_jobs_add_instances_and_leave_killed_or_cancelled(
    mini_slurm: Any, tiny_model: Path, tmp_path: Path
) -> None:
    overrides = paced(tmp_path, 0.6) | {
        "model": tiny_model, "trainer.total_training_steps": 60, "data.max_response_length": 64,
        "gen_actor_rollout_ref.rollout.ignore_eos": True,
        "hydra.launcher.sbatch": "['--exclude=n2']",
    }  # fmt: skip
    member = launch_one(mini_slurm, tmp_path / "sweep", overrides)
    member.at_step(3)
    killed = at_work(mini_slurm, member)
    for process in processes_of_joiner(member, killed):
        with suppress(psutil.NoSuchProcess):  # it may go with the ones before it
            process.kill()
    member.at_step(member.steps()[-1] + 3)
    cancelled = at_work(mini_slurm, member)
    mini_slurm.run("scancel", cancelled)
    member.at_step(member.steps()[-1] + 3)
    member.until(lambda: not processes_of_joiner(member, cancelled), "nothing was left of the cancelled joiner")
    hurry(tmp_path)
    report = member.completed(steps=60)
    assert report.fates["trained"] == 60 * 4
    assert not processes_of_joiner(member, killed)
    assert "left after SIGTERM" in (member.dir.logs / f"joiner-{cancelled}.out").read_text()


def processes_of_joiner(member: Member, job: str) -> set[psutil.Process]:
    found = set()
    for process in processes(member, ""):
        try:
            if any(f"join-{job}-" in part for part in process.cmdline()) or "psrl.join" in process.cmdline():
                found.add(process)
        except psutil.Error:
            continue
    return found
