"""What sync and migration did in each step, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from psrl.telemetry.coordination import COUNTERS, per_step
from psrl.telemetry.figures import AMBER, BLUE, GREEN, HALF, RED, curve, finish, new_figure, step_axis
from psrl.telemetry.metrics import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = {"interrupted_samples": BLUE, "migrated_samples": AMBER}
EVENTS = {"pulls": GREEN, "migrations": AMBER, "failed_pulls": RED}


def events(rows: Sequence[Row]) -> Figure | None:
    return _counted(rows, EVENTS, "Pulls and migrations in each step")


def moved_samples(rows: Sequence[Row]) -> Figure | None:
    return _counted(rows, SAMPLES, "Samples interrupted or moved in each step")


def _counted(rows: Sequence[Row], colours: dict[str, str], title: str) -> Figure | None:
    found = {name: per_step(rows, name) for name in colours}
    if not any(sum(values) for _, values in found.values()):
        return None
    figure, (axes,) = new_figure(HALF)
    for name, (steps, values) in found.items():
        if sum(values):
            curve(axes, steps, values, colours[name], COUNTERS[name])
    axes.set_ylim(bottom=0)
    finish(axes, title, "", legend=True)
    step_axis(axes, rows)
    return figure
