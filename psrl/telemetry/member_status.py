"""Where one run stands: what its directory and Slurm's queue say together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from psrl.outcome import COMPLETED, FAILED, INTERRUPTED, Outcome, read_outcome
from psrl.rundir.layout import RunDir
from psrl.slurm.jobs import SubmittedJob, newest_job
from psrl.slurm.queue import PENDING, RUNNING, QueuedJob, QueueReading
from psrl.telemetry.members import Member
from psrl.telemetry.metrics import Row, number
from psrl.telemetry.progress import ETA_STEPS
from psrl.telemetry.recent import StalenessTail, last_step, last_trouble, mean_of, rate, recent_rows, restarts

REQUEUED = "REQUEUED"
"""Slurm calls it PENDING: the job has run before and will go on."""
SUBMITTED, RUNNING_HERE, NOT_STARTED, NO_VERDICT = "submitted", "running here", "not started", "no verdict"
VERDICTS = (COMPLETED, FAILED, INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One row of the table. None: not known (yet)."""

    name: str
    run_dir: str
    settings: dict[str, str]
    job_id: str | None
    state: str
    """Slurm's word while a job is in the queue, REQUEUED, a verdict, or one of the words above."""
    detail: str
    """Why it waits; or how long it has run and where."""
    step: int
    total_steps: int | None
    reward: float | None
    """Mean of the last step."""
    max_staleness: int | None
    tokens_per_s: float | None
    """Over the last ten steps."""
    eta_s: float | None
    restarts: int
    """Processes started again in place."""
    requeues: int
    trouble: str
    """The verdict's cause, or the newest death or error line."""

    @property
    def settled(self) -> bool:
        """Nothing more will come, as far as can be seen."""
        return self.state in (*VERDICTS, NO_VERDICT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the run directory says at one moment."""

    outcome: Outcome | None = None
    """Of the last attempt that has one."""
    job: SubmittedJob | None = None
    launcher_lives: bool = False
    """A local launcher holds the directory, on this host."""
    begun: bool = False
    rows: list[Row] = field(default_factory=list)
    total_steps: int | None = None
    max_staleness: int | None = None
    restarts: int = 0
    trouble: str = ""

    @property
    def verdict(self) -> Outcome | None:
        """The outcome, unless it is of an attempt before the newest submission."""
        if self.outcome is None or self.job is None or _job_of(self.outcome) == self.job.job_id:
            return self.outcome
        return None

    @property
    def asks_slurm(self) -> bool:
        """Whether the queue can tell more: a completed or failed job is not requeued."""
        return self.job is not None and (self.verdict is None or self.verdict.status == INTERRUPTED)

    def status(self, member: Member, queue: QueueReading) -> MemberStatus:
        queued = queue.jobs.get(self.job.job_id) if self.job is not None else None
        state, detail = state_of(self, queued, queue)
        step, step_s = last_step(self.rows), mean_of(self.rows, "timing_s/step")
        eta_s = None
        if state in (RUNNING, RUNNING_HERE) and self.total_steps is not None and step_s is not None:
            eta_s = max(self.total_steps - step, 0) * step_s
        return MemberStatus(
            name=member.name,
            run_dir=str(member.path),
            settings=dict(member.settings),
            job_id=None if self.job is None else self.job.job_id,
            state=state,
            detail=detail,
            step=step,
            total_steps=self.total_steps,
            reward=number(self.rows[-1], "critic/rewards/mean") if self.rows else None,
            max_staleness=self.max_staleness,
            tokens_per_s=rate(self.rows, "perf/total_num_tokens"),
            eta_s=eta_s,
            restarts=self.restarts,
            requeues=queued.restarts if queued is not None else _requeues_of(self.verdict),
            trouble="" if state == COMPLETED else self.trouble,
        )


def state_of(facts: RunFacts, queued: QueuedJob | None, queue: QueueReading) -> tuple[str, str]:
    """(state, detail) of a run whose job is `queued`; None: it is not in the queue, or has none."""
    verdict, job = facts.verdict, facts.job
    if queued is not None:
        if queued.state == PENDING:
            after = f" on job {job.after}" if job is not None and job.after and queued.reason == "Dependency" else ""
            return REQUEUED if queued.restarts else PENDING, f"{queued.reason}{after}"
        # The verdict of the attempt before is still there until the next one has begun.
        if verdict is not None and verdict.status != INTERRUPTED and _requeues_of(verdict) == queued.restarts:
            return verdict.status, ""
        return queued.state, " ".join([queued.elapsed, *queued.nodes])
    if facts.launcher_lives and (verdict is None or verdict.status == INTERRUPTED):
        return RUNNING_HERE, ""
    if verdict is not None:
        return verdict.status, ""
    if job is None:
        return (NO_VERDICT, "it does not run on this host") if facts.begun else (NOT_STARTED, "")
    if queue.problem or queue.asked_at_s <= job.submitted_at_s:
        return SUBMITTED, ""
    return NO_VERDICT, "its job has left the queue"


class MemberReader:
    """Reads a run directory at each look: what is small as a whole, of what grows the end."""

    def __init__(self, path: Path) -> None:
        self._run_dir = RunDir(path)
        self._staleness = StalenessTail(self._run_dir.metrics)
        self._config: tuple[tuple[int, int], int | None] | None = None

    def read(self) -> RunFacts:
        run_dir = self._run_dir
        outcome = _outcome(run_dir)
        rows = recent_rows(run_dir.metrics, ETA_STEPS)
        return RunFacts(
            outcome=outcome,
            job=_job(run_dir),
            launcher_lives=_launcher_lives(run_dir),
            begun=bool(rows) or (run_dir.ledger.is_dir() and any(run_dir.ledger.iterdir())),
            rows=rows,
            total_steps=self._total_steps(),
            max_staleness=self._staleness.poll(),
            restarts=restarts(run_dir.logs),
            trouble=" ".join(outcome.cause.split())
            if outcome is not None and outcome.cause
            else last_trouble(run_dir.logs),
        )

    def _total_steps(self) -> int | None:
        """`trainer.total_training_steps`, read again only when the file has changed."""
        try:
            stat = self._run_dir.config.stat()
        except FileNotFoundError:
            return None
        key = (stat.st_mtime_ns, stat.st_size)
        if self._config is None or self._config[0] != key:
            self._config = (key, _total_steps(self._run_dir.config))
        return self._config[1]


def _total_steps(config: Path) -> int | None:
    import yaml

    try:
        tree = yaml.load(config.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (FileNotFoundError, yaml.YAMLError):
        return None
    trainer: Any = tree.get("trainer") if isinstance(tree, Mapping) else None
    steps = trainer.get("total_training_steps") if isinstance(trainer, Mapping) else None
    return steps if isinstance(steps, int) else None


def _outcome(run_dir: RunDir) -> Outcome | None:
    try:
        return read_outcome(run_dir)
    except msgspec.DecodeError:  # half of it is visible on this node; the next look sees it whole
        return None


def _job(run_dir: RunDir) -> SubmittedJob | None:
    try:
        return newest_job(run_dir.path)
    except (ValueError, TypeError):  # the same
        return None


def _job_of(outcome: Outcome) -> str:
    return outcome.attempt.rpartition("-")[0]


def _requeues_of(outcome: Outcome | None) -> int:
    """An attempt on Slurm is called JOB-REQUEUES."""
    job, _, count = outcome.attempt.rpartition("-") if outcome is not None else ("", "", "")
    return int(count) if job.isdigit() and count.isdigit() else 0


def _launcher_lives(run_dir: RunDir) -> bool:
    """The mark holds the launcher's pid and start time; a process that got the pid later has another start time."""
    try:
        pid, started = (run_dir.rendezvous / "launcher.pid").read_text().split()
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19] == started
    except (OSError, ValueError, IndexError):
        return False
