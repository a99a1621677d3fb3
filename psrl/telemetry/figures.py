"""How every figure of the report looks: one palette, one style, and the few parts that all plots are made of."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from psrl.telemetry.metrics import STEP_KEY, Row, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1f2937", "#6b7280", "#e5e7eb", "#ffffff"
BLUE, GREEN, AMBER, RED, VIOLET, SKY = "#2563eb", "#059669", "#d97706", "#dc2626", "#7c3aed", "#7dd3fc"
COLOURS = {
    "wait": "#e2e8f0",
    "idle": "#e2e8f0",
    "read": SKY,
    "update": BLUE,
    "push": AMBER,
    "checkpoint": VIOLET,
    "busy": "#34a67a",
    "pull": "#f2a93b",
    "switch": RED,
    "sleep": "#94a3b8",
    "wake": "#94a3b8",
    "other": "#cbd5e1",
}
"""One colour for one thing, wherever it appears."""
LABELS = {
    "busy": "decoding",
    "wait": "waiting or idle",
    "idle": "waiting or idle",
    "switch": "paused for new weights",
    "pull": "pulling weights",
    "push": "publishing weights",
    "sleep": "releasing GPU memory",
    "wake": "taking GPU memory",
}

MAX_BARS = 120
MAX_SMOOTHING = 25
HALF = (6.0, 3.0)
WIDE = 12.3
STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "axes.edgecolor": "#cbd5e1",
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.hashsalt": "psrl",  # the same run gives the same bytes
}


def label(name: str) -> str:
    return LABELS.get(name, name)


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib in the report's style, without touching the caller's settings."""
    import matplotlib

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def new_figure(size: tuple[float, float], rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure of its own (no pyplot, no global state) and its axes in reading order."""
    from matplotlib.figure import Figure as MatplotlibFigure

    figure = MatplotlibFigure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    return figure, list(axes.flat)


def data_uri(figure: Figure, kind: str = "svg") -> str:
    """The figure as a data URI: "svg" (sharp) or "png" (for very many shapes)."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(buffer, format=kind, dpi=170, metadata=metadata)
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    return f"data:{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving mean over `window` values, fewer at the ends. `smooth([0, 3, 6], 3) == [1.5, 3, 4.5]`"""
    half = window // 2
    out = []
    for index in range(len(values)):
        part = values[max(index - half, 0) : index + half + 1]
        out.append(sum(part) / len(part))
    return out


def whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))


def series(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that have a finite number there."""
    pairs = [(float(row[STEP_KEY]), value) for row in rows if (value := number(row, key)) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def total_histogram(rows: Sequence[Row], key: str) -> dict[int, int]:
    """Counts by bucket over all rows, in bucket order."""
    total: Counter[int] = Counter()
    for row in rows:
        histogram = row.get(key)
        if isinstance(histogram, Mapping):
            total.update({int(bucket): int(count) for bucket, count in histogram.items()})
    return dict(sorted(total.items()))


def curve(axes: Axes, steps: Sequence[float], values: Sequence[float], colour: str, name: str) -> None:
    """A line; with many points the raw one faint behind its moving mean."""
    window = min(len(values) // 20, MAX_SMOOTHING)
    if window < 3:
        axes.plot(steps, values, color=colour, label=name, **dot(values))
        return
    axes.plot(steps, values, color=colour, alpha=0.28, linewidth=0.9, label=name)
    axes.plot(steps, smooth(values, window), color=colour, label=f"moving mean of {window // 2 * 2 + 1} steps")


def dot(values: Sequence[float]) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4} if len(values) < 15 else {}


def finish(axes: Axes, title: str, ylabel: str, xlabel: str = "step", legend: bool = False) -> None:
    """Names, whole numbers on the x axis, and a legend where there is room."""
    axes.set_title(title)
    axes.set_ylabel(ylabel)
    axes.set_xlabel(xlabel)
    whole_numbers(axes.xaxis)
    axes.tick_params(length=0)
    if legend:
        axes.legend(loc="best", handlelength=1.4, labelcolor=INK)
    axes.yaxis.label.set_color(MUTED)


def percent(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def step_axis(axes: Axes, rows: Sequence[Row]) -> None:
    """The step axis from the first step to the last, with room for a lone one."""
    first, last = rows[0][STEP_KEY], rows[-1][STEP_KEY]
    margin = max((last - first) * 0.015, 0.6)
    axes.set_xlim(first - margin, last + margin)


def legend_above(axes: Axes) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 1.0), ncols=6, handlelength=0.9, columnspacing=0.8, borderpad=0.1
    )


def chunked(rows: Sequence[Row]) -> tuple[list[list[Row]], int]:
    """At most MAX_BARS runs of neighbouring rows, and how many steps each covers."""
    size = -(-len(rows) // MAX_BARS)
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)], size


def centre(rows: Sequence[Row]) -> float:
    return sum(float(row[STEP_KEY]) for row in rows) / len(rows)
