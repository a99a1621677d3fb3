"""The verdict on one attempt of a run: `outcome.json`, written once, by whoever knows it first."""

from __future__ import annotations

import os
import time

import msgspec

from psrl.rundir.layout import RunDir

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


def publish_outcome(run_dir: RunDir, outcome: Outcome) -> bool:
    """Write the verdict; False if there is one already (the first counts)."""
    outcome.ended_at_s = time.time()
    temporary = run_dir.outcome.with_name(f".outcome-{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=1))
    try:
        os.link(temporary, run_dir.outcome)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink()


def read_outcome(run_dir: RunDir) -> Outcome | None:
    """The verdict, or None while there is none."""
    try:
        return msgspec.json.decode(run_dir.outcome.read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None


def archive_outcome(run_dir: RunDir) -> None:
    """A new attempt begins: move the last verdict out of the way, keeping it."""
    if run_dir.outcome.exists():
        attempt = len(list(run_dir.logs.glob("outcome-*.json")))
        run_dir.outcome.rename(run_dir.logs / f"outcome-{attempt}.json")
