"""The verdict on one attempt of a run: `outcome.json`, written once, by whoever knows it first."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from psrl.rundir.layout import RunDir
from psrl.rundir.publish import publish, read_published, write_atomic

COMPLETED, FAILED, INTERRUPTED = "completed", "failed", "interrupted"


class Outcome(msgspec.Struct, kw_only=True):
    """status: completed | failed | interrupted (drained: the same command goes on). Exit codes that pass through a
    scheduler are not to be relied on, this file is."""

    status: str
    cause: str = ""
    version: int = 0
    counters: dict[str, int] = {}
    ended_at_s: float = 0.0
    """Unix time."""
    attempt: str = ""
    """The start of the run that this is the verdict on (PSRL_ATTEMPT)."""


def current_attempt() -> str:
    """Names this start of the whole run: the same in all its processes, another after a resume or requeue."""
    return os.environ.get("PSRL_ATTEMPT", "0")


def publish_outcome(run_dir: RunDir, outcome: Outcome) -> bool:
    """Write the verdict on the current attempt; False if there is one already (the first counts).

    Each attempt's verdict is published under a name of its own; `outcome.json` is a copy of the newest for readers."""
    outcome.ended_at_s, outcome.attempt = time.time(), current_attempt()
    content = msgspec.json.format(msgspec.json.encode(outcome), indent=1)
    try:
        publish(_verdict_of_attempt(run_dir), content)
    except FileExistsError:
        return False
    write_atomic(run_dir.outcome, content)
    return True


def read_outcome(run_dir: RunDir) -> Outcome | None:
    """The verdict on the last attempt that has one, or None while there is none."""
    try:
        return msgspec.json.decode(run_dir.outcome.read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None


def current_outcome(run_dir: RunDir) -> Outcome | None:
    """The verdict on the current attempt, or None while there is none."""
    path = _verdict_of_attempt(run_dir)
    return msgspec.json.decode(read_published(path), type=Outcome) if path.exists() else None


def begin_attempt(run_dir: RunDir) -> None:
    """For the one process that leads an attempt: `outcome.json` no longer tells of the last one."""
    outcome = read_outcome(run_dir)
    if outcome is not None and outcome.attempt != current_attempt():
        run_dir.outcome.unlink(missing_ok=True)


def _verdict_of_attempt(run_dir: RunDir) -> Path:
    return run_dir.rendezvous / f"verdict-{current_attempt()}"
