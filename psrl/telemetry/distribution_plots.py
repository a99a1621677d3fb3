"""How old the trained groups were, and how long the responses: over the run, and over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from psrl.telemetry.figures import (
    AMBER,
    BLUE,
    COLOURS,
    HALF,
    RED,
    centre,
    chunked,
    curve,
    dot,
    finish,
    legend_above,
    new_figure,
    percent,
    series,
    step_axis,
    total_histogram,
)
from psrl.telemetry.metrics import Row
from psrl.telemetry.step_metrics import bucket_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def staleness_histogram(rows: Sequence[Row], bound: int | None) -> Figure | None:
    counts = total_histogram(rows, "staleness/hist")
    if not counts:
        return None
    figure, (axes,) = new_figure(HALF)
    total = sum(counts.values())
    lags = range(max([*counts, bound or 0]) + 1)
    heights = [counts.get(lag, 0) / total for lag in lags]
    colours = [RED if bound is not None and lag > bound else BLUE for lag in lags]
    bars = axes.bar(list(lags), heights, width=0.62, color=colours)
    axes.bar_label(bars, [f"{height:.0%}" if height >= 0.005 or not height else "<1%" for height in heights], padding=2)
    if bound is not None:
        axes.axvline(bound + 0.5, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_xlim(-0.6, max(len(lags), bound + 2) - 0.2)
        axes.annotate(f" allowed: {bound}", (bound + 0.5, 1), xycoords=("data", "axes fraction"), color=RED, va="top")
    axes.margins(y=0.16)
    axes.grid(axis="x", visible=False)
    percent(axes)
    finish(
        axes, f"How old {total:,} trained groups were".replace(",", " "), "share of groups", xlabel="versions behind"
    )
    return figure


def staleness_over_steps(rows: Sequence[Row], bound: int | None) -> Figure | None:
    """Stacked shares of groups by lag, one bar a step (neighbours together when there are many steps)."""
    lags = list(total_histogram(rows, "staleness/hist"))
    if not lags:
        return None
    figure, (axes,) = new_figure(HALF)
    chunks, size = chunked([row for row in rows if row.get("staleness/hist")])
    counts = [total_histogram(chunk, "staleness/hist") for chunk in chunks]
    centres = [centre(chunk) for chunk in chunks]
    bottom = [0.0] * len(chunks)
    for lag in lags:
        shares = [count.get(lag, 0) / sum(count.values()) for count in counts]
        colour = RED if bound is not None and lag > bound else _blue(lag, max(lags[-1], bound or 0))
        name = f"{lag} behind" if len(lags) <= 6 or lag in (lags[0], lags[-1]) else None
        axes.bar(centres, shares, size, bottom, color=colour, label=name, linewidth=0)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set_ylim(0, 1)
    axes.grid(visible=False)
    percent(axes)
    finish(axes, "Each step", "share of groups")
    step_axis(axes, rows)
    legend_above(axes)
    return figure


def length_histogram(rows: Sequence[Row]) -> Figure | None:
    if not total_histogram(rows, "response_length/hist"):
        return None
    figure, (axes,) = new_figure(HALF)
    fifth = max(len(rows) // 5, 1)
    parts = [("all steps", list(rows), BLUE)]
    if len(rows) >= 10:
        parts = [
            ("first fifth of the steps", list(rows[:fifth]), COLOURS["other"]),
            ("last fifth", list(rows[-fifth:]), BLUE),
        ]
    for name, part, colour in parts:
        counts = total_histogram(part, "response_length/hist")
        total = sum(counts.values())
        if not total:
            continue
        widths = [bucket_width(lower) for lower in counts]
        # Density, not counts: buckets grow with the length, and a wide bucket must not look like many samples.
        heights = [count / total / width for count, width in zip(counts.values(), widths, strict=True)]
        edges = [lower - 0.5 for lower in counts]  # a length is a whole number: its bar is centred on it
        axes.bar(edges, heights, widths, align="edge", color=colour, alpha=0.65, label=name, linewidth=0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    finish(axes, "How long trained responses were", "", xlabel="response tokens", legend=True)
    return figure


def lengths_over_steps(rows: Sequence[Row]) -> Figure | None:
    steps, means = series(rows, "response_length/mean")
    if not steps:
        return None
    figure, (upper, lower) = new_figure((HALF[0], 3.0), 2, 1, sharex=True, gridspec_kw={"height_ratios": [2.4, 1]})
    lows, highs = series(rows, "response_length/min"), series(rows, "response_length/max")
    if len(lows[0]) == len(highs[0]) == len(steps):
        upper.fill_between(steps, lows[1], highs[1], color=BLUE, alpha=0.1, linewidth=0, label="shortest to longest")
    curve(upper, steps, means, BLUE, "mean")
    upper.set_ylim(bottom=0)
    finish(upper, "Response length of each step", "tokens", xlabel="", legend=True)
    clip_steps, clipped = series(rows, "response_length/clip_ratio")
    lower.plot(clip_steps, clipped, color=AMBER, linewidth=1.3, **dot(clipped))
    percent(lower)
    lower.set_ylim(bottom=0, top=max([*clipped, 0.01]) * 1.15)
    finish(lower, "", "cut off")
    step_axis(lower, rows)
    return figure


def _blue(lag: int, most: int) -> tuple[float, float, float]:
    """Light for a fresh group, dark for an old one."""
    from matplotlib.colors import to_rgb

    share = lag / most if most else 0.0
    light, dark = to_rgb("#bfdbfe"), to_rgb("#1e40af")
    red, green, blue = (low + (high - low) * share for low, high in zip(light, dark, strict=True))
    return red, green, blue
