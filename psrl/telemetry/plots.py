"""Curves of the report over steps. Each function takes metrics rows and gives a figure, or None without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from psrl.telemetry.figures import (
    BLUE,
    COLOURS,
    GREEN,
    HALF,
    WIDE,
    centre,
    chunked,
    curve,
    finish,
    legend_above,
    new_figure,
    series,
    step_axis,
)
from psrl.telemetry.metrics import Row, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = {
    "actor/pg_loss": "policy loss",
    "actor/grad_norm": "gradient norm",
    "actor/entropy": "entropy",
    "actor/ppo_kl": "KL to the old policy",
    "actor/pg_clipfrac": "share of clipped tokens",
    "actor/lr": "learning rate",
}
TRAINER_PARTS = {
    "wait": "timing_s/wait_buffer",
    "read": "timing_s/read",
    "update": "timing_s/update_actor",
    "push": "timing_s/push_weights",
    "checkpoint": "timing_s/save_checkpoint",
}
MAX_CORRECTION_PANELS = 12
CORRECTION_FIRST = ("kl", "k3_kl", "rollout_is_eff_sample_size", "rollout_is_mean", "rollout_is_max", "ppl_ratio")


def reward(rows: Sequence[Row]) -> Figure | None:
    steps, values = series(rows, "critic/rewards/mean")
    if not steps:
        return None
    figure, (axes,) = new_figure((WIDE, 3.4))
    lows, highs = series(rows, "critic/rewards/min"), series(rows, "critic/rewards/max")
    # Rewards of 0 and 1 fill the whole height at every step: a band that never moves says nothing.
    if len(lows[1]) == len(highs[1]) == len(steps) and (len(set(lows[1])) > 1 or len(set(highs[1])) > 1):
        axes.fill_between(steps, lows[1], highs[1], color=BLUE, alpha=0.08, linewidth=0, label="least to greatest")
    curve(axes, steps, values, BLUE, "mean of each step")
    finish(axes, "", "mean reward", legend=True)
    step_axis(axes, rows)
    return figure


def throughput(rows: Sequence[Row]) -> Figure | None:
    steps, values = series(rows, "perf/throughput")
    if not steps:
        return None
    figure, (axes,) = new_figure((WIDE, 2.6))
    curve(axes, steps, values, GREEN, "tokens/s")
    axes.set_ylim(bottom=0)
    finish(axes, "Trained tokens per second", "prompt and response")
    step_axis(axes, rows)
    return figure


def overlap(rows: Sequence[Row]) -> Figure | None:
    steps, values = series(rows, "overlap/hidden_fraction")
    if not steps:
        return None
    figure, (axes,) = new_figure((WIDE, 2.6))
    curve(axes, steps, values, BLUE, "hidden share")
    axes.set_ylim(0, 1)
    finish(axes, "Training work done while its own buffer still filled", "share of the step's work")
    step_axis(axes, rows)
    return figure


def trainer_time(rows: Sequence[Row]) -> Figure | None:
    """Stacked bars of what the trainer did in each step (mean of neighbours when there are many steps)."""
    known = [row for row in rows if number(row, "timing_s/step") is not None]
    if not known:
        return None
    chunks, size = chunked(known)
    figure, (axes,) = new_figure(HALF)
    centres = [centre(chunk) for chunk in chunks]
    bottom = [0.0] * len(chunks)
    parts = {part: [_mean_of(chunk, key) for chunk in chunks] for part, key in TRAINER_PARTS.items()}
    whole = [_mean_of(chunk, "timing_s/step") for chunk in chunks]
    parts["other"] = [max(t - sum(p[i] for p in parts.values()), 0.0) for i, t in enumerate(whole)]
    for part, heights in parts.items():
        if any(heights):
            axes.bar(centres, heights, size * 0.9, bottom, color=COLOURS[part], label=part, linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.grid(axis="x", visible=False)
    finish(axes, "Seconds of a step", "seconds")
    step_axis(axes, known)
    legend_above(axes)
    return figure


def losses(rows: Sequence[Row]) -> Figure | None:
    return small_multiples(rows, LOSSES)


def correction(rows: Sequence[Row]) -> Figure | None:
    names = {key.removeprefix("rollout_corr/") for row in rows for key in row if key.startswith("rollout_corr/")}
    ordered = [*(name for name in CORRECTION_FIRST if name in names), *sorted(names - set(CORRECTION_FIRST))]
    return small_multiples(rows, {f"rollout_corr/{name}": name for name in ordered[:MAX_CORRECTION_PANELS]})


def small_multiples(rows: Sequence[Row], titles: Mapping[str, str], columns: int = 3) -> Figure | None:
    """One small panel for each key that the rows have, under its title."""
    present = [(key, title) for key, title in titles.items() if series(rows, key)[0]]
    if not present:
        return None
    columns = min(columns, len(present))
    lines = -(-len(present) // columns)
    figure, axes = new_figure((WIDE, 1.9 * lines + 0.25), lines, columns, sharex=True)
    for panel, (key, title) in zip(axes, present, strict=False):
        curve(panel, *series(rows, key), BLUE, title)
        finish(panel, title, "", xlabel="")
        step_axis(panel, rows)
    for panel in axes[len(present) :]:
        panel.set_visible(False)
    for panel in axes[-columns:]:
        panel.set_xlabel("step")
    return figure


def _mean_of(rows: Sequence[Row], key: str) -> float:
    return sum(number(row, key) or 0.0 for row in rows) / len(rows)
