"""Validation over versions. Rows are those of `validation.jsonl`, whose step is the validated version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from psrl.telemetry.figures import (
    AMBER,
    BLUE,
    GREEN,
    RED,
    SKY,
    VIOLET,
    WIDE,
    curve,
    dot,
    finish,
    new_figure,
    series,
    step_axis,
)
from psrl.telemetry.metrics import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REWARD = "val/reward_mean"
MAX_SOURCES = 5


def sources(rows: Sequence[Row]) -> list[str]:
    """Data sources with a reward of their own, in order."""
    keys = {key for row in rows for key in row} - {REWARD}
    found = [key for key in keys if key.startswith("val/") and key.endswith("/reward_mean")]
    return sorted(key.removeprefix("val/").removesuffix("/reward_mean") for key in found)


def validation(rows: Sequence[Row]) -> Figure | None:
    """Mean reward (of each data source too, where there are several) and mean response length."""
    if not series(rows, REWARD)[0]:
        return None
    figure, (reward, length) = new_figure((WIDE, 3.0), 1, 2)
    curve(reward, *series(rows, REWARD), BLUE, "all prompts")
    named = sources(rows)
    if len(named) > 1:
        for name, colour in zip(named[:MAX_SOURCES], (GREEN, AMBER, VIOLET, SKY, RED), strict=False):
            steps, values = series(rows, f"val/{name}/reward_mean")
            reward.plot(steps, values, color=colour, linewidth=1.2, label=name, **dot(values))
    finish(reward, "Mean reward on held-out prompts", "mean reward", xlabel="version", legend=len(named) > 1)
    curve(length, *series(rows, "val/response_length_mean"), GREEN, "")
    length.set_ylim(bottom=0)
    finish(length, "Mean response length", "tokens", xlabel="version")
    for axes in (reward, length):
        step_axis(axes, rows)
    return figure
