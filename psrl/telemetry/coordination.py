"""What sync and migration did, from the counters in the metrics rows: `rollout/<name>`, growing from each coordinator's
start. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.telemetry.figures import series
from psrl.telemetry.metrics import Row

COUNTERS = {
    "pulls": "pulls of new weights",
    "interrupted_samples": "samples that a pull interrupted",
    "migrations": "migrations",
    "migrated_samples": "samples that were moved to a less busy instance",
    "failed_pulls": "failed pulls",
}


def per_step(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """(steps, how much the counter grew in each). Less than before: a new coordinator has begun to count.

    >>> rows = [{"training/global_step": i + 1, "rollout/pulls": pulls} for i, pulls in enumerate((2, 5, 1))]
    >>> per_step(rows, "pulls")
    ([1.0, 2.0, 3.0], [2.0, 3.0, 1.0])
    """
    steps, totals = series(rows, f"rollout/{name}")
    before = [0.0, *totals]
    return steps, [now - then if now >= then else now for now, then in zip(totals, before, strict=False)]


def describe(rows: Sequence[Row]) -> str:
    """For the report: every counter that has counted, in words."""
    totals = {words: sum(per_step(rows, name)[1]) for name, words in COUNTERS.items()}
    counted = [f"{words}: {total:.0f}" for words, total in totals.items() if total]
    return f"In the whole run, {'; '.join(counted)}." if counted else "No instance has pulled weights yet."
