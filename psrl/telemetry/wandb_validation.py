"""Validation rows on their way to Weights & Biases.

W&B takes steps in ascending order only, and a validation ends some steps after its version was trained. So a row goes into
the step that was logged last, with `val/version` as the axis of its own. A logger that starts again sends the rows again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from psrl.telemetry.metrics import STEP_KEY, Row

VERSION_KEY = "val/version"


class ValidationLog:
    """Rows that wait for the training step of their version."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._waiting: list[Row] = []
        self._defined: set[str] = set()

    def add(self, rows: Iterable[Row]) -> None:
        self._waiting += rows

    def log(self, step: int) -> None:
        """Log the rows of versions up to `step`, the newest training step that is logged."""
        due = [row for row in self._waiting if row[STEP_KEY] <= step]
        self._waiting = [row for row in self._waiting if row[STEP_KEY] > step]
        for row in due:
            values = {key: value for key, value in row.items() if key.startswith("val/") and value is not None}
            for key in values.keys() - self._defined:
                self._run.define_metric(key, step_metric=None if key == VERSION_KEY else VERSION_KEY)
            self._defined |= values.keys()
            self._run.log(values, step=step)
