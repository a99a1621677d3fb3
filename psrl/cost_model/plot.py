"""Pictures of a cost model: the curves, and the measured points on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from psrl.cost_model.fit import StepTime
from psrl.protocol.cost_model import CostModel
from psrl.telemetry.figures import AMBER, BLUE, GREEN, MUTED, RED, SKY, VIOLET, WIDE, finish, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (SKY, BLUE, GREEN, AMBER, RED, VIOLET)


def save_fit_plot(path: Path, model: CostModel, points: Sequence[StepTime], held_out: set[int], title: str) -> None:
    """Left: step time over the batch size, a curve for each length. Right: predicted against measured."""
    with style():
        figure, (curves, agreement) = new_figure((WIDE, 4.2), 1, 2)
        lengths = sorted({round(p.kv_tokens / p.num_seqs) for p in points})
        for index, length in enumerate(lengths):
            of_length = [p for p in points if round(p.kv_tokens / p.num_seqs) == length]
            _latency_curve(curves, model, [p.num_seqs for p in of_length], length, _COLOURS[index % len(_COLOURS)])
            curves.plot(
                [p.num_seqs for p in of_length],
                [p.latency_s * 1e3 for p in of_length],
                color=_COLOURS[index % len(_COLOURS)],
                marker="o",
                linestyle="none",
                markersize=5,
            )
        finish(curves, title, "ms a decode step", "sequences", legend=True)
        _logarithmic(curves)
        _agreement(agreement, model, points, held_out)
        _save(figure, path)


def save_model_plot(
    path: Path, model: CostModel, nums_seqs: Sequence[int], tokens_per_seq: Sequence[int], title: str
) -> None:
    """Left: step time, right: throughput, both over the batch size."""
    with style():
        figure, (latency, throughput) = new_figure((WIDE, 4.2), 1, 2)
        for index, length in enumerate(tokens_per_seq):
            colour = _COLOURS[index % len(_COLOURS)]
            _latency_curve(latency, model, nums_seqs, length, colour)
            n = _range(nums_seqs)
            throughput.plot(n, [model.throughput(x, x * length) for x in n], color=colour, label=_label(length))
        finish(latency, title, "ms a decode step", "sequences", legend=True)
        finish(throughput, "Throughput", "tokens/s", "sequences", legend=True)
        for axes in (latency, throughput):
            _logarithmic(axes, y=False)
        _save(figure, path)


def _latency_curve(axes: Axes, model: CostModel, nums_seqs: Sequence[int], length: int, colour: str) -> None:
    n = _range(nums_seqs)
    axes.plot(n, [model.latency_s(x, x * length) * 1e3 for x in n], color=colour, label=_label(length))


def _label(length: int) -> str:
    return f"{length} tokens each"


def _range(nums_seqs: Sequence[int]) -> list[float]:
    return np.geomspace(max(min(nums_seqs), 1), max(nums_seqs), 200).tolist()


def _agreement(axes: Axes, model: CostModel, points: Sequence[StepTime], held_out: set[int]) -> None:
    for name, colour, chosen in (
        ("fitted", BLUE, [p for i, p in enumerate(points) if i not in held_out]),
        ("held out", RED, [p for i, p in enumerate(points) if i in held_out]),
    ):
        predicted = [model.latency_s(p.num_seqs, p.kv_tokens) * 1e3 for p in chosen]
        axes.plot(
            [p.latency_s * 1e3 for p in chosen], predicted, color=colour, marker="o", linestyle="none", label=name
        )
    ends = np.array([min(p.latency_s for p in points), max(p.latency_s for p in points)]) * 1e3
    axes.plot(ends, ends, color=MUTED, linewidth=1)
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color=MUTED, alpha=0.12, linewidth=0, label="within 10%")
    finish(axes, "Predicted against measured", "predicted ms", "measured ms", legend=True)
    _logarithmic(axes)


def _logarithmic(axes: Axes, y: bool = True) -> None:
    """Powers of two, written as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    if y:
        axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis) if y else (axes.xaxis,):
        axis.set_major_locator(LogLocator(base=2))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
