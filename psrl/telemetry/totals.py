"""What was trained up to a step, from rows that tell each step only. Axes for a dashboard that cannot sum."""

from __future__ import annotations

from psrl.telemetry.metrics import STEP_KEY, Row, number

SAMPLES, TIME = "training/total_samples", "training/total_time_s"
SUMMED = {SAMPLES: "training/num_samples", TIME: "timing_s/step"}


class Totals:
    """Give it every row in file order. A step that comes again after a resume counts once, as it was the first time."""

    def __init__(self) -> None:
        self._step = 0
        self._sums = dict.fromkeys(SUMMED, 0.0)

    def with_totals(self, row: Row) -> Row:
        """The row and the totals up to its step. Time is that of steps: start-up and waiting in a queue are not in it."""
        if row[STEP_KEY] > self._step:
            self._step = row[STEP_KEY]
            for name, key in SUMMED.items():
                self._sums[name] += number(row, key) or 0.0
        return row | self._sums
