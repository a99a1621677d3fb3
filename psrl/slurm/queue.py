"""What Slurm's queue says of this user's jobs: one `squeue --me`, asked at most every 30 s. Needs no accounting."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from psrl.config.errors import ConfigError

FIELDS = ("JobID", "HetJobID", "HetJobOffset", "State", "Reason", "RestartCnt", "TimeUsed", "NodeList")
COMMAND = ("squeue", "--me", "--noheader", "-O", ",".join(f"{name}:|" for name in FIELDS))
"""`:|` ends a field with a bar and does not limit its width."""
INTERVAL_S = 30.0
DEADLINE_S = 15.0
"""squeue needs 9 s to find out that its controller is down."""
PENDING, RUNNING = "PENDING", "RUNNING"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job in the queue; a heterogeneous one as a whole, with its leader's state."""

    leader: str
    """Job id; of a heterogeneous job its leader's."""
    state: str
    """Slurm's word: PENDING, RUNNING, COMPLETING, ..."""
    reason: str = ""
    """Why it waits, in Slurm's word; "" if Slurm gives none."""
    restarts: int = 0
    """How often it was requeued."""
    elapsed: str = ""
    """Slurm's form, [D-]H:MM:SS or M:SS."""
    nodes: tuple[str, ...] = ()
    """Bracketed node list of each component, the leader's first."""


@dataclass(frozen=True, slots=True)
class QueueReading:
    """The queue as it was at `asked_at_s` (Unix time). With a `problem` nothing is known of any job."""

    jobs: Mapping[str, QueuedJob] = field(default_factory=dict)
    asked_at_s: float = 0.0
    problem: str = ""


class Queue:
    """Asks again only when the last answer, or failure, is older than 30 s."""

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._command, self._clock, self._wall = command, clock, wall
        self._asked_s = float("-inf")
        self._reading = QueueReading()

    def read(self) -> QueueReading:
        if self._clock() - self._asked_s >= INTERVAL_S:
            self._asked_s, asked_at_s = self._clock(), self._wall()
            jobs, problem = _ask(self._command)
            self._reading = QueueReading(jobs, asked_at_s, problem)
        return self._reading


def queued_jobs() -> list[QueuedJob]:
    """All jobs of this user now. Raises ConfigError if squeue does not tell."""
    reading = Queue().read()
    if reading.problem:
        raise ConfigError(f"Slurm's queue cannot be read: {reading.problem}.")
    return list(reading.jobs.values())


def parse_queue(text: str) -> dict[str, QueuedJob]:
    """Jobs by their leader from what `COMMAND` prints; lines of another form are skipped."""
    components: dict[str, list[dict[str, str]]] = {}
    for line in text.splitlines():
        values = line.split("|")
        if len(values) != len(FIELDS) + 1:
            continue
        row = {name: "" if value == "N/A" else value for name, value in zip(FIELDS, values, strict=False)}
        components.setdefault(row["HetJobID"] or row["JobID"], []).append(row)
    return {job_id: _job(job_id, rows) for job_id, rows in components.items()}


def _job(job_id: str, rows: list[dict[str, str]]) -> QueuedJob:
    rows = sorted(rows, key=lambda row: int(row["HetJobOffset"] or 0))
    leader = rows[0]
    return QueuedJob(
        leader=job_id,
        state=leader["State"],
        reason=next((row["Reason"] for row in rows if row["Reason"] not in ("", "None")), ""),
        restarts=int(leader["RestartCnt"] or 0),
        elapsed=leader["TimeUsed"],
        nodes=tuple(row["NodeList"] for row in rows if row["NodeList"]),
    )


def _ask(command: Sequence[str]) -> tuple[dict[str, QueuedJob], str]:
    """(jobs, "") or ({}, why nothing is known)."""
    # A user's own SQUEUE_FORMAT, SQUEUE_STATES or SQUEUE_PARTITION would hide jobs.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S
        )
    except FileNotFoundError:
        return {}, f"there is no {command[0]} on this host"
    except subprocess.TimeoutExpired:
        return {}, f"{command[0]} gave no answer within {DEADLINE_S:g} s"
    except OSError as error:
        return {}, f"{command[0]} cannot be run: {error.strerror}"
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return {}, lines[-1] if lines else f"{command[0]} ended with exit code {done.returncode}"
    return parse_queue(done.stdout), ""
