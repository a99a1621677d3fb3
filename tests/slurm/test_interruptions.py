"""Requeue, warnings, time limit, preemption, lost nodes, deaths: time is lost, data never."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from sweeps import Member, hurry, launch_one, paced

from psrl.outcome import read_outcome

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]


def test_a_requeue_and_a_warning_in_the_middle(mini_slurm: Any, tiny_model: Path, tmp_path: Path) -> None:
    """`scontrol requeue`, later `scancel --signal=USR2`: twice the same run goes on, with one wandb run (B20, B25)."""
    overrides = paced(tmp_path, 0.2) | {
        "model": tiny_model, "trainer.total_training_steps": 24, "trainer.logger": "[console,wandb]",
    }  # fmt: skip
    member = launch_one(mini_slurm, tmp_path / "sweep", overrides)
    member.at_step(4)
    mini_slurm.run("scontrol", "requeue", member.job_id)
    member.until(lambda: member.restarts == 1 and member.state() == "RUNNING", "the first restart")
    member.at_step(max(9, member.steps()[-1] + 3))  # the last of them made by the second attempt
    wandb_id = (member.dir.rendezvous / "wandb_id").read_text()
    mini_slurm.run("scancel", "--signal=USR2", member.job_id)
    member.until(lambda: member.restarts == 2, "the second restart")
    hurry(tmp_path)
    report = member.completed(steps=24)
    assert report.fates["trained"] == 24 * 4
    assert (member.dir.rendezvous / "wandb_id").read_text() == wandb_id
    logged = member.dir.logs / f"wandb_steps.{wandb_id.strip()}"
    steps = [
        int(word) for word in logged.read_text().split() if word != "end"
    ]  # W&B itself was killed with unsent rows
    assert list(dict.fromkeys(reversed(steps)))[::-1] == list(range(1, 25))
    assert "psrl: interrupted: SIGUSR2 at" in member.job_log and "psrl: requeueing job" in member.job_log


def test_preemption_of_the_rollout_partition_alone(mini_slurm: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Only the rollout nodes are warned; the whole run drains and comes back when the nodes are free again."""
    overrides = paced(tmp_path, 0.5) | {
        "model": tiny_model, "trainer.total_training_steps": 20, "psrl.deployment.n_rollout_instances": 2,
        "hydra.launcher.rollout.partition": "preemptible",
    }  # fmt: skip
    member = launch_one(mini_slurm, tmp_path / "sweep", overrides)
    member.at_step(4)
    urgent = mini_slurm.submit("#!/bin/bash\nsleep 5\n", "--partition=urgent", "--nodes=2", "--exclusive")
    member.until(lambda: member.restarts >= 1, "the requeue")
    hurry(tmp_path)
    member.completed(steps=20)
    assert mini_slurm.job_info(urgent)[0]["JobState"] == "COMPLETED"


def test_a_lost_node_requeues_the_run(mini_slurm: Any, tiny_model: Path, tmp_path: Path) -> None:
    """slurmd and its stepds are killed, so the node's own processes are orphans: they leave by themselves, and the run
    goes on from its last checkpoint when the node is back."""
    overrides = paced(tmp_path, 0.2) | {"model": tiny_model, "trainer.total_training_steps": 20}
    member = launch_one(mini_slurm, tmp_path / "sweep", overrides)
    member.at_step(4)
    node = member.node_of("rollout-node").pop()
    orphans = processes(member, "rollout-node-0") | processes(member, "instance-0")
    assert orphans
    mini_slurm.kill_daemons(node)
    _, alive = psutil.wait_procs(orphans, timeout=30)
    assert not alive, alive
    mini_slurm.start_node(node)
    member.until(lambda: member.restarts >= 1, "the requeue after the node's failure")
    hurry(tmp_path)
    member.completed(steps=20)


def test_a_killed_trainer_ends_the_job_with_the_cause(mini_slurm: Any, tiny_model: Path, tmp_path: Path) -> None:
    """A fault of the run's own: FAILED within a minute on all nodes, not requeued, the cause in the job's log."""
    overrides = paced(tmp_path, 0.2) | {"model": tiny_model, "trainer.total_training_steps": 1000}
    member = launch_one(mini_slurm, tmp_path / "sweep", overrides)
    member.at_step(2)
    (trainer,) = processes(member, "trainer-0")
    trainer.kill()
    assert member.ended(timeout_s=60) == "FAILED", member.story()
    assert member.restarts == 0
    outcome = read_outcome(member.dir)
    assert outcome is not None and outcome.cause == "trainer-0 ended by signal SIGKILL"
    first_screen = member.job_log.splitlines()[:40]
    assert "psrl: failed: trainer-0 ended by signal SIGKILL" in first_screen
    member.audit()


def test_a_killed_instance_restarts_in_place_and_cancelling_ends_everything(
    mini_slurm: Any, tiny_model: Path, tmp_path: Path
) -> None:
    overrides = paced(tmp_path, 0.2) | {"model": tiny_model, "trainer.total_training_steps": 1000}
    member = launch_one(mini_slurm, tmp_path / "sweep", overrides)
    member.at_step(2)
    (first,) = processes(member, "instance-0")
    first.kill()
    second = member.until(lambda: processes(member, "instance-0") - {first}, "the instance's successor")
    step = member.steps()[-1]
    member.at_step(step + 3)
    assert member.restarts == 0
    mini_slurm.run("scancel", member.job_id)
    assert member.ended(timeout_s=90) == "CANCELLED"
    psutil.wait_procs(second, timeout=30)
    member.until(lambda: not processes(member, ""), "nothing of the run is left, its srun included", timeout_s=60)
    member.audit()
    assert "psrl: requeueing" not in member.job_log


def processes(member: Member, name: str) -> set[psutil.Process]:
    """Processes of the run with `name` among their arguments ("" for all of them)."""
    found = set()
    for process in psutil.process_iter():
        try:
            argv, state = process.cmdline(), process.status()
        except psutil.Error:
            continue
        here = str(member.dir.path) in argv and process.pid != os.getpid() and (not name or name in argv)
        if here and state != psutil.STATUS_ZOMBIE:
            found.add(process)
    return found
