"""What the report shows, in which order and with which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psrl.telemetry import distribution_plots, plots
from psrl.telemetry.figures import data_uri
from psrl.telemetry.record import RunRecord
from psrl.telemetry.timeline_plots import MAX_LANES, instance_time, timeline, whole_window, zoom_window

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Panel:
    image: str
    """A data URI."""
    alt: str
    caption: str
    wide: bool


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    hint: str
    panels: list[Panel]


@dataclass(frozen=True, slots=True)
class Plot:
    """A panel to be drawn; `kind` "png" for plots of very many shapes. One that draws None is left out."""

    draw: Callable[[], Figure | None]
    alt: str
    caption: str = ""
    wide: bool = False
    kind: str = "svg"


def build_sections(record: RunRecord, zero_s: float) -> list[Section]:
    """Sections that have something to show; `zero_s` is the Unix time that the timeline calls 0."""
    rows, bound = record.rows, record.config.get("psrl.staleness")
    return drawn(
        (
            "Reward",
            "Mean reward of the samples that each step trained on.",
            [Plot(lambda: plots.reward(rows), "Mean reward over training steps", wide=True)],
        ),
        ("Who was busy when", _lanes_hint(record), _timelines(record, zero_s)),
        (
            "Where the time went",
            "The larger of the two busy shares bounds the run; what is spent waiting or idle can be won.",
            [
                Plot(lambda: plots.trainer_time(rows), "Parts of each trainer step"),
                Plot(lambda: instance_time(record.tracks), "Time of each instance"),
                Plot(lambda: plots.throughput(rows), "Trained tokens per second", wide=True),
                Plot(lambda: plots.overlap(rows), "Share of training work hidden behind rollout", wide=True),
            ],
        ),
        (
            "Staleness",
            "How many versions the training weights were ahead of those that a group was started with.",
            [
                Plot(lambda: distribution_plots.staleness_histogram(rows, bound), "Histogram of staleness"),
                Plot(lambda: distribution_plots.staleness_over_steps(rows, bound), "Staleness over steps"),
            ],
        ),
        (
            "Responses",
            "Lengths in tokens of the responses that were trained. Cut off: the length budget ended it.",
            [
                Plot(lambda: distribution_plots.length_histogram(rows), "Histogram of response lengths"),
                Plot(lambda: distribution_plots.lengths_over_steps(rows), "Response lengths over steps"),
            ],
        ),
        (
            "Rollout correction",
            "How far the sampling weights were from the training weights, and what the correction did about it.",
            [Plot(lambda: plots.correction(rows), "Rollout correction metrics over steps", wide=True)],
        ),
        (
            "Optimisation",
            "The policy update of each step.",
            [Plot(lambda: plots.losses(rows), "Loss, gradient norm and more over steps", wide=True)],
        ),
    )


def _timelines(record: RunRecord, zero_s: float) -> list[Plot]:
    zoom = zoom_window(record.tracks, record.summary["step_s_mean"])
    whole = whole_window(record.tracks)
    if whole is None:
        return []
    wanted = [] if zoom is None else [(zoom, "A few steps in the middle")]
    if zoom is None or zoom[1] - zoom[0] < 0.8 * (whole[1] - whole[0]):
        wanted.append((whole, "The whole run"))
    return [
        Plot(
            lambda window=window: timeline(record.tracks, window, zero_s, record.incidents),  # type: ignore[misc]
            f"Timeline: {caption}",
            caption,
            wide=True,
            kind="png",
        )
        for window, caption in wanted
    ]


def _lanes_hint(record: RunRecord) -> str:
    hint = "One lane a process. The thin bar below a lane: new weights arrive while decoding goes on."
    lanes = {track.name for track in record.tracks if track.role in ("trainer", "instance")}
    return hint if len(lanes) <= MAX_LANES else f"{hint} {MAX_LANES} of {len(lanes)} processes are shown."


def drawn(*wanted: tuple[str, str, list[Plot]]) -> list[Section]:
    """Each (title, hint, plots) as a section, without the plots that draw None and sections of such alone."""
    sections = []
    for title, hint, parts in wanted:
        panels = []
        for plot in parts:
            figure = plot.draw()
            if figure is not None:
                panels.append(Panel(data_uri(figure, plot.kind), plot.alt, plot.caption, plot.wide))
        if panels:
            sections.append(Section(title, hint, panels))
    return sections
