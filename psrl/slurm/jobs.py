"""`jobs.jsonl` of a run directory: one line for each submission; a requeue keeps its job's id."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    job_id: str
    """The leader's id of a heterogeneous job."""
    submitted_at_s: float
    """Unix time."""
    after: str | None = None
    """The job that must have ended before this one starts."""


def append_job(run_dir: Path, job: SubmittedJob) -> None:
    with (run_dir / "jobs.jsonl").open("a") as file:
        file.write(json.dumps(asdict(job)) + "\n")


def newest_job(run_dir: Path) -> SubmittedJob | None:
    """The last submission, None for a run that was never submitted. A line that is torn says nothing."""
    try:
        lines = (run_dir / "jobs.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return SubmittedJob(**json.loads(line))
        except ValueError:
            continue
    return None
