"""How launched samples ended, and how long they were, as figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from psrl.telemetry.figures import AMBER, BLUE, GREEN, HALF, RED, curve, finish, new_figure, series, step_axis
from psrl.telemetry.metrics import Row
from psrl.telemetry.population import CENSORED, COMPLETE, run_population

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEANS = (
    ("consumed", BLUE, "consumed"),
    ("complete", GREEN, "all that finished by themselves"),
    ("censored", AMBER, "cut short, so far"),
)


def ends_by_kind(rows: Sequence[Row]) -> Figure | None:
    """Samples by how they ended, over the run."""
    population = run_population(rows)
    kinds = [kind for kind in (*COMPLETE, *CENSORED) if population.of(kind).count]
    if not kinds:
        return None
    figure, (axes,) = new_figure(HALF)
    counts = [population.of(kind).count for kind in kinds]
    bars = axes.barh(kinds, counts, color=[RED if kind in CENSORED else BLUE for kind in kinds], height=0.62)
    axes.bar_label(
        bars,
        [f"{count} ({population.of(kind).mean:.0f})" for kind, count in zip(kinds, counts, strict=True)],
        padding=3,
    )
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(axis="y", visible=False)
    finish(axes, "How samples ended (mean tokens); red: cut short", "", xlabel="samples")
    return figure


def mean_lengths(rows: Sequence[Row]) -> Figure | None:
    """Mean lengths of what ended in each step."""
    known = [(name, colour, words) for name, colour, words in MEANS if series(rows, f"rollout/mean_length/{name}")[0]]
    if not known:
        return None
    figure, (axes,) = new_figure(HALF)
    for name, colour, words in known:
        curve(axes, *series(rows, f"rollout/mean_length/{name}"), colour, words)
    axes.set_ylim(bottom=0)
    finish(axes, "Mean length of what ended in each step", "tokens", legend=True)
    step_axis(axes, rows)
    return figure
