"""Plots that lay the members of a sweep side by side. Each gives a figure, or None without data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from textwrap import wrap
from typing import TYPE_CHECKING

from psrl.telemetry.figures import (
    AMBER,
    BLUE,
    COLOURS,
    GREEN,
    HALF,
    INK,
    MAX_SMOOTHING,
    RED,
    SKY,
    VIOLET,
    WIDE,
    dot,
    finish,
    new_figure,
    percent,
    smooth,
    total_histogram,
    whole_numbers,
)
from psrl.telemetry.metrics import Row, number
from psrl.telemetry.sweep_record import SweepMember

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = (BLUE, AMBER, GREEN, VIOLET, RED, SKY, "#9f1239", "#4d7c0f")
MAX_LEGEND = 16
MAX_PANELS = 16
MAX_BARS = 40
REWARD, STEP_TIME = "critic/rewards/mean", "timing_s/step"


def reward_over_time(members: Sequence[SweepMember]) -> Figure | None:
    """Mean reward over the sum of step times so far."""
    return _rewards(members, STEP_TIME)


def reward_over_samples(members: Sequence[SweepMember]) -> Figure | None:
    """Mean reward over the number of samples trained so far."""
    return _rewards(members, "training/num_samples")


def step_times(members: Sequence[SweepMember]) -> Figure | None:
    """A bar a member: the median step, and the speed-up beside it."""
    known = [(m, m.row.step_s) for m in members if m.row.step_s is not None][:MAX_BARS]
    if not known:
        return None
    from matplotlib.ticker import AutoLocator

    figure, axes = _bars([member for member, _ in known])
    bars = axes.barh(
        [-row for row in range(len(known))],
        [step_s for _, step_s in known],
        0.62,
        color=[_colour(members, member) for member, _ in known],
    )
    axes.bar_label(bars, [_step_text(member) for member, _ in known], padding=4, color=INK)
    axes.margins(x=0.28)
    axes.set_xlim(left=0)
    finish(axes, "Step time (median)", "", xlabel="seconds")
    axes.xaxis.set_major_locator(AutoLocator())
    return figure


def busy_shares(members: Sequence[SweepMember]) -> Figure | None:
    """Two bars a member: how much of the training time instances decoded and the trainer worked."""
    known = [m for m in members if None not in (m.row.rollout_busy_fraction, m.row.train_busy_fraction)][:MAX_BARS]
    if not known:
        return None
    figure, axes = _bars(known)
    for offset, colour, name, shares in (
        (0.17, COLOURS["busy"], "instances decode", [m.row.rollout_busy_fraction or 0.0 for m in known]),
        (-0.17, BLUE, "trainer works", [m.row.train_busy_fraction or 0.0 for m in known]),
    ):
        axes.barh([offset - row for row in range(len(known))], shares, 0.32, color=colour, label=name)
    axes.set_xlim(0, 1)
    finish(axes, "Busy share of the training time", "", xlabel="")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, handlelength=0.9)
    return figure


def staleness_histograms(members: Sequence[SweepMember]) -> Figure | None:
    """A small histogram a member, all on the same axes."""
    known = [(m, total_histogram(m.rows, "staleness/hist")) for m in members]
    known = [(m, counts) for m, counts in known if counts][:MAX_PANELS]
    if not known:
        return None
    columns = min(len(known), 4)
    lines = -(-len(known) // columns)
    figure, panels = new_figure((WIDE, 2.0 * lines + 0.3), lines, columns, sharex=True, sharey=True)
    most = max(max([*counts, m.row.staleness or 0]) for m, counts in known)
    for axes, (member, counts) in zip(panels, known, strict=False):
        lags, total = range(most + 1), sum(counts.values())
        bound = member.row.staleness
        colours = [RED if bound is not None and lag > bound else _colour(members, member) for lag in lags]
        axes.bar(list(lags), [counts.get(lag, 0) / total for lag in lags], 0.62, color=colours)
        axes.set_ylim(0, 1)
        axes.set_xlim(-0.6, max(most, 1) + 0.6)
        percent(axes)
        whole_numbers(axes.xaxis)
        axes.grid(axis="x", visible=False)
        finish(axes, _lines(member.label, 40), "", xlabel="")
    for axes in panels[len(known) :]:
        axes.set_visible(False)
    for axes in panels[max(len(known) - columns, 0) : len(known)]:
        axes.set_xlabel("versions behind")
        axes.tick_params(labelbottom=True)
    return figure


def _rewards(members: Sequence[SweepMember], key: str) -> Figure | None:
    """Reward over `key` summed up, which is seconds or samples."""
    curves = [(member, *_against(member.rows, key)) for member in members]
    curves = [curve for curve in curves if curve[1]]
    if not curves:
        return None
    scale, unit = 1.0, "samples trained"
    if key == STEP_TIME:
        scale, unit = _time_unit(max(xs[-1] for _, xs, _ in curves))
    figure, (axes,) = new_figure((WIDE, 3.6))
    for member, xs, values in curves:
        colour, scaled = _colour(members, member), [x / scale for x in xs]
        window = min(len(values) // 20, MAX_SMOOTHING)
        if window >= 3:
            axes.plot(scaled, values, color=colour, alpha=0.2, linewidth=0.8)
            values = smooth(values, window)
        axes.plot(scaled, values, color=colour, label=_lines(member.label, 44), **dot(values))
    axes.set_xlim(left=0)
    finish(axes, "", "mean reward", xlabel=unit)
    if len(curves) <= MAX_LEGEND:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.2)
    return figure


def _against(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """(`key` summed up to each step, reward) of the rows that have both."""
    pairs = [(number(row, key), number(row, REWARD)) for row in rows]
    known = [(amount, reward) for amount, reward in pairs if amount is not None and reward is not None]
    return list(accumulate(amount for amount, _ in known)), [reward for _, reward in known]


def _time_unit(longest_s: float) -> tuple[float, str]:
    for scale, unit in ((3600.0, "hours"), (60.0, "minutes")):
        if longest_s > 3 * scale:
            return scale, f"{unit} of training"
    return 1.0, "seconds of training"


def _bars(known: Sequence[SweepMember]) -> tuple[Figure, Axes]:
    """Axes with a named place for each member's bar, the first at the top."""
    figure, (axes,) = new_figure((HALF[0], max(0.42 * len(known) + 1.1, 2.4)))
    names = [_lines(member.label, 28) for member in known]
    axes.set_yticks([-row for row in range(len(known))], names)
    axes.set_ylim(-len(known) + 0.4, 0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _step_text(member: SweepMember) -> str:
    row = member.row
    text = f"{row.step_s:.3g} s"
    return text if row.speedup is None or row.reference == row.name else f"{text}, {row.speedup:.2f} x"


def _colour(members: Sequence[SweepMember], member: SweepMember) -> str:
    """The same for a member in every plot."""
    index = next(i for i, other in enumerate(members) if other is member)
    if len(members) <= len(PALETTE):
        return PALETTE[index]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](index / (len(members) - 1) * 0.92))


def _lines(text: str, width: int) -> str:
    return "\n".join(wrap(text, width, break_long_words=False)[:3])
