"""A sweep on Slurm: every member is composed and checked before the first is submitted, then each becomes one job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.outcome import COMPLETED, Outcome, read_outcome
from psrl.rundir.layout import RunDir
from psrl.setup_run import already_completed, completed_before, lay_out, sweep_entry
from psrl.slurm.cluster import read_cluster
from psrl.slurm.environment import no_kill_asked
from psrl.slurm.executor import Executor
from psrl.slurm.job_text import Job, job_text
from psrl.slurm.jobs import SubmittedJob, append_job, newest_job
from psrl.slurm.plan import plan_job
from psrl.slurm.queue import Queue, queued_jobs
from psrl.slurm.settings import SlurmConf, check_settings
from psrl.trainer.checkpoints import newest_complete, read_metadata

WAIT_POLL_S = 2.0
SAVE_FACTOR = 1.5
"""The warning before the end must leave this many times the measured time of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Member:
    """One run of the sweep."""

    number: int
    overrides: tuple[str, ...]
    run_dir: RunDir
    config: Config


def launch_sweep(
    overrides: Sequence[Sequence[str]],
    run_dirs: Sequence[Path],
    conf: SlurmConf,
    *,
    sweep_dir: Path,
    first_number: int = 0,
) -> list[Outcome | None]:
    """Submit (or only print) one job for each list of overrides; `run_dirs` where each lives if it names none.

    Returns the verdicts: with `wait` those of the ended runs, else None for each submitted and the old one of a completed
    member. Raises ConfigError, one sentence, before anything is submitted."""
    if key := no_kill_asked(os.environ):
        raise ConfigError(
            f"{key} is set: with --no-kill a heterogeneous job whose node is lost never starts again; unset it."
        )
    check_settings(conf)
    members = [
        _compose(first_number + i, member, path, conf.dry_run)
        for i, (member, path) in enumerate(zip(overrides, run_dirs, strict=True))
    ]
    cluster, reason = read_cluster()
    if cluster is None and not conf.dry_run:
        raise ConfigError(f"hydra/launcher=submitit_slurm cannot submit: {reason}; leave the launcher out to run here.")
    jobs = [
        plan_job(
            member.config.psrl.deployment,
            conf,
            number=member.number,
            run_dir=member.run_dir.path,
            python=sys.executable,
            cluster=cluster,
            colocate=member.config.psrl.colocate,
        )
        for member in members
    ]
    if conf.dry_run:
        if cluster is None:
            print(f"psrl: not compared with the cluster: {reason}", file=sys.stderr)
        _print_jobs(members, jobs, conf.max_parallel_jobs)
        return [None] * len(members)
    done = [_refuse_or_done(member, conf) for member in members]
    todo = [(member, job) for member, job, verdict in zip(members, jobs, done, strict=True) if verdict is None]
    _check_inputs([member for member, _ in todo])
    _submit(todo, conf, sweep_dir)
    if conf.wait:
        return _wait_all(members)
    return done


def exit_codes(verdicts: Sequence[Outcome | None], waited: bool) -> list[int]:
    """0 for what is submitted or completed, 1 for a run that was waited for and is not completed."""
    return [int(waited and (verdict is None or verdict.status != COMPLETED)) for verdict in verdicts]


def _compose(number: int, overrides: Sequence[str], path: Path, dry_run: bool) -> Member:
    config = cast(Config, OmegaConf.to_object(compose_config(overrides)))
    for warning in check(config, only_planned=dry_run):
        print(f"psrl: warning: member {number}: {warning}", file=sys.stderr)
    run_dir = Path(config.run_dir).expanduser().resolve() if config.run_dir else path.resolve()
    config.run_dir = str(run_dir)
    return Member(number, tuple(overrides), RunDir(run_dir), config)


def _refuse_or_done(member: Member, conf: SlurmConf) -> Outcome | None:
    """The verdict of a member that is completed already. Refuses one that waits or runs, or that cannot go on."""
    run_dir = member.run_dir
    job = newest_job(run_dir.path)
    if job is not None and job.job_id in {queued.leader for queued in queued_jobs()}:
        raise ConfigError(
            f"run_dir={run_dir.path} belongs to job {job.job_id}, which is in the queue: wait for it, end it (scancel {job.job_id}), "
            "or use another directory."
        )
    if done := completed_before(run_dir, member.config):
        print(already_completed(run_dir, done))
        return done
    newest, _ = newest_complete(run_dir.checkpoints) if run_dir.checkpoints.is_dir() else (None, [])
    if newest is not None and SAVE_FACTOR * (save_s := float(read_metadata(newest)["seconds"])) > conf.signal_delay_s:
        raise ConfigError(
            f"hydra.launcher.signal_delay_s={conf.signal_delay_s} is refused: a checkpoint of {run_dir.path} took {save_s:.0f} s; "
            f"use at least {SAVE_FACTOR * save_s:.0f}."
        )
    return None


def _check_inputs(members: Sequence[Member]) -> None:
    """Data and reward of each member, checked where it is submitted: a mistyped path is not to wait in a queue first."""
    checked: list[dict[str, Any]] = []
    for member in members:
        tree: Any = OmegaConf.to_container(OmegaConf.structured(member.config))
        psrl = tree["psrl"]
        part = {key: tree[key] for key in ("data", "reward", "model")} | {
            "B": psrl["staleness_buffer_entries"],
            "routing": psrl["rollout_coordination"]["routing_strategy"],
        }
        if part in checked:
            continue
        checked.append(part)
        command = [sys.executable, "-m", "psrl.prepare", "--check", "--parent", str(os.getpid()), "-"]
        text = OmegaConf.to_yaml(OmegaConf.structured(member.config))
        done = subprocess.run(command, input=text, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise ConfigError(lines[-1].removeprefix("psrl: ") if lines else "the check of data and reward failed.")


def _submit(todo: Sequence[tuple[Member, Job]], conf: SlurmConf, sweep_dir: Path) -> None:
    for member, _ in todo:  # all of them first: the first to start looks at the others
        member.run_dir.create()
        lay_out(member.run_dir, member.config, sweep_entry(sweep_dir, member.number, member.overrides))
    ids: list[str] = []
    for member, job in todo:
        after = _predecessor(ids, conf.max_parallel_jobs)
        job_id = Executor(Path(conf.submitit_folder)).submit_job(replace(job, after=after))
        ids.append(job_id)
        append_job(member.run_dir.path, SubmittedJob(job_id=job_id, submitted_at_s=time.time(), after=after))
        print(f"psrl: job {job_id}  {member.run_dir.path}  {' '.join(_settings(member, todo))}".rstrip(), flush=True)
    if todo:
        place = (
            todo[0][0].run_dir.path if len(todo) == 1 else Path(os.path.commonpath([m.run_dir.path for m, _ in todo]))
        )
        print(f"psrl: watch with: python -m psrl.status --watch {place}")


def _settings(member: Member, todo: Sequence[tuple[Member, Job]]) -> list[str]:
    """The overrides in which this member differs from another."""
    return [o for o in member.overrides if any(o not in other.overrides for other, _ in todo)]


def _predecessor(ids: Sequence[str], max_parallel: int | None) -> str | None:
    """With at most k jobs at a time, a job waits for the k-th before it."""
    return ids[-max_parallel] if max_parallel is not None and len(ids) >= max_parallel else None


def _print_jobs(members: Sequence[Member], jobs: Sequence[Job], max_parallel: int | None) -> None:
    names: list[str] = []
    for member, job in zip(members, jobs, strict=True):
        after = _predecessor(names, max_parallel)
        names.append(f"<job of member {member.number}>")
        print(f"# member {member.number}: {' '.join(member.overrides)}")
        print(job_text(replace(job, after=after)))


def _wait_all(members: Sequence[Member]) -> list[Outcome | None]:
    queue = Queue()
    verdicts = []
    for member in members:
        verdicts.append(verdict := _wait(member, queue))
        said = "no verdict" if verdict is None else f"{verdict.status} {verdict.cause}".strip()
        print(f"psrl: {member.run_dir.path}: {said}", flush=True)
    return verdicts


def _wait(member: Member, queue: Queue) -> Outcome | None:
    """The verdict of a member, or None if its job left the queue without one. Only the launcher asks Slurm, seldom."""
    told = ""
    while True:
        outcome = read_outcome(member.run_dir)
        if outcome is not None and outcome.status == COMPLETED:
            return outcome
        reading, job = queue.read(), newest_job(member.run_dir.path)
        if reading.problem and reading.problem != told:
            told = reading.problem
            print(f"psrl: Slurm's queue cannot be read: {told}; still waiting", file=sys.stderr)
        if not reading.problem and (job is None or job.job_id not in reading.jobs):
            return read_outcome(member.run_dir)  # it may have come while the queue was asked
        time.sleep(WAIT_POLL_S)
