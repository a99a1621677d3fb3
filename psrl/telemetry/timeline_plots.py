"""Who was busy when, and what each instance spent its time on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from psrl.telemetry.figures import COLOURS, HALF, INK, MUTED, RED, WIDE, label, new_figure
from psrl.telemetry.record import Incident
from psrl.telemetry.summary import busy_over
from psrl.telemetry.timeline import BUSY, IDLE, PULL, PUSH, SWITCH, WAIT, Span, seconds_in
from psrl.telemetry.timeline_read import Track, by_name, training_windows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LANES = 16
MAX_INSTANCE_BARS = 8
MAX_SPANS_A_LANE = 500
MAX_VERSION_LABELS = 20
BINS = 300
ZOOM_S = 10.0
RESOLUTION = 1500
"""A span is drawn at least as wide as this part of the axis."""
DRAWN = (IDLE, *(name for name in COLOURS if name not in (IDLE, PULL, SWITCH)), SWITCH, PULL)
"""From the back to the front."""


def zoom_window(tracks: Sequence[Track], step_s: float | None) -> tuple[float, float] | None:
    """About 10 s (or four steps, if that is longer) in the middle of the last stretch of training."""
    windows = training_windows(tracks)
    if not windows:
        return None
    start, end = windows[-1]
    length = min(max(ZOOM_S, 4 * (step_s or 0.0)), end - start)
    middle = (start + end) / 2
    return middle - length / 2, middle + length / 2


def whole_window(tracks: Sequence[Track]) -> tuple[float, float] | None:
    spans = [span for track in tracks for span in track.spans]
    if not spans:
        return None
    return min(span.start_s for span in spans), max(span.end_s for span in spans)


def timeline(
    tracks: Sequence[Track], window: tuple[float, float], zero_s: float, incidents: Sequence[Incident] = ()
) -> Figure | None:
    """One lane a process: its work as bars, weights on their way in a thin bar below, deaths as crosses."""
    lanes = _lanes(tracks)
    if not lanes or window[1] <= window[0]:
        return None
    figure, (axes,) = new_figure((WIDE, 0.36 * len(lanes) + 1.05))
    seen: dict[str, None] = {}
    for height, (name, own) in enumerate(lanes.items()):
        spans = [span for track in own for span in track.spans]
        _lane(axes, -height, [*_lifetimes(own), *spans], window, zero_s, seen)
        for incident in incidents:
            if incident.name == name and incident.time_s is not None and window[0] <= incident.time_s <= window[1]:
                axes.plot(
                    incident.time_s - zero_s, -height, "x", color=RED, markersize=9, markeredgewidth=2.4, zorder=5
                )
                seen.setdefault("died")
    axes.set_ylim(-len(lanes) + 0.4, 0.6)
    axes.set_xlim(window[0] - zero_s, window[1] - zero_s)
    _name_rows(axes, list(lanes))
    _time_axis(axes)
    _legend(axes, list(seen))
    return figure


def instance_time(tracks: Sequence[Track]) -> Figure | None:
    """Share of the training time that each instance decoded, stood still for new weights, or had nothing to decode;
    of many instances the mean, the busiest and the least busy one."""
    windows = training_windows(tracks)
    instances = by_name(tracks, "instance")
    if not instances or sum(end - start for start, end in windows) <= 0:
        return None
    shares = {
        name: [busy_over(spans, windows, (part,)) for part in (BUSY, SWITCH)] for name, spans in instances.items()
    }
    if len(shares) > MAX_INSTANCE_BARS:
        busy = sorted(shares, key=lambda name: shares[name][0])
        mean = [sum(column) / len(shares) for column in zip(*shares.values(), strict=True)]
        most, least = busy[-1], busy[0]
        shares = {f"mean of {len(busy)}": mean, f"most: {most}": shares[most], f"least: {least}": shares[least]}
    figure, (axes,) = new_figure(HALF)
    for row, (busy_share, switch_share) in enumerate(shares.values()):
        left = 0.0
        for part, share in (
            (BUSY, busy_share),
            (SWITCH, switch_share),
            (IDLE, max(1 - busy_share - switch_share, 0.0)),
        ):
            axes.barh(-row, share, 0.6, left, color=COLOURS[part], label=label(part) if not row else None)
            left += share
        if busy_share > 0.08:
            middle = busy_share / 2
            axes.text(middle, -row, f"{busy_share:.0%}", ha="center", va="center", color="white", fontweight="bold")
    axes.set_ylim(-max(len(shares), 4) + 0.4, 0.6)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_title("Instances while the trainer ran")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, handlelength=0.9)
    _name_rows(axes, list(shares))
    return figure


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def _lanes(tracks: Sequence[Track]) -> dict[str, list[Track]]:
    """Tracks by process name, trainer ranks first, at most MAX_LANES names."""
    names: dict[str, dict[str, list[Track]]] = {"trainer": {}, "instance": {}}
    for track in tracks:
        if track.role in names:
            names[track.role].setdefault(track.name, []).append(track)
    # Ranks of the trainer move in step, so a few of them tell it all; the rest of the room is for instances.
    few = max(MAX_LANES // 4, MAX_LANES - len(names["instance"]))
    return dict([*list(names["trainer"].items())[:few], *names["instance"].items()][:MAX_LANES])


def _lifetimes(tracks: Sequence[Track]) -> list[Span]:
    """An instance that does nothing else is idle from its first span to its last, whether it says so or not."""
    return [
        Span(IDLE, min(span.start_s for span in track.spans), max(span.end_s for span in track.spans))
        for track in tracks
        if track.role == "instance" and track.spans
    ]


def _lane(
    axes: Axes, height: float, spans: Sequence[Span], window: tuple[float, float], zero_s: float, seen: dict[str, None]
) -> None:
    visible = [span for span in spans if span.end_s > window[0] and span.start_s < window[1]]
    seen.update(dict.fromkeys(span.name for span in visible if span.name in COLOURS))
    if len(visible) > MAX_SPANS_A_LANE:
        _dense_lane(axes, height, visible, window, zero_s)
        return
    thinnest_s = (window[1] - window[0]) / RESOLUTION
    for name in DRAWN:
        bars = [(s.start_s - zero_s, max(s.end_s - s.start_s, thinnest_s)) for s in visible if s.name == name]
        low, thick = (height - 0.42, 0.14) if name == PULL else (height - 0.28, 0.56)
        axes.broken_barh(bars, (low, thick), facecolors=_shades(name, visible), linewidth=0)
    margin_s = (window[1] - window[0]) / 50
    publications = [span for span in visible if span.name == PUSH and "version" in span.attributes]
    if len(publications) <= MAX_VERSION_LABELS:
        for span in publications:
            if span.end_s + margin_s < window[1]:
                text, x = f"v{span.attributes['version']}", span.end_s - zero_s
                axes.text(x, height + 0.3, text, fontsize=7, color=MUTED, ha="center", va="bottom")


def _dense_lane(axes: Axes, height: float, spans: Sequence[Span], window: tuple[float, float], zero_s: float) -> None:
    """Too many spans to tell apart: for each short stretch of time, stacked shares of what went on in it."""
    width_s = (window[1] - window[0]) / BINS
    left = [window[0] - zero_s + index * width_s for index in range(BINS)]
    bottom = [height - 0.28] * BINS
    for name in [*(name for name in DRAWN if name not in (IDLE, WAIT, PULL)), WAIT, IDLE]:
        shares = binned([span for span in spans if span.name == name], window, BINS)
        room = [max(height + 0.28 - low, 0.0) for low in bottom]  # idle fills up what nothing else took
        tall = [min(share * 0.56, most) for share, most in zip(shares, room, strict=True)]
        axes.bar(left, tall, width_s, bottom, align="edge", color=COLOURS[name], linewidth=0)
        bottom = [low + up for low, up in zip(bottom, tall, strict=True)]


def binned(spans: Sequence[Span], window: tuple[float, float], bins: int) -> list[float]:
    """Share of each of `bins` equal parts of `window` that the spans cover.

    `binned([Span("busy", 1, 4)], (0, 8), 4) == [0.5, 1.0, 0.0, 0.0]`
    """
    width_s = (window[1] - window[0]) / bins
    seconds = [0.0] * bins
    for span in spans:
        first = max(int((span.start_s - window[0]) / width_s), 0)
        last = min(int((span.end_s - window[0]) / width_s), bins - 1)
        for index in range(first, last + 1):
            seconds[index] += seconds_in(span, (window[0] + index * width_s, window[0] + (index + 1) * width_s))
    return [min(total / width_s, 1.0) for total in seconds]


def _shades(name: str, spans: Sequence[Span]) -> list[tuple[float, float, float, float]]:
    """A coalesced span is as strong as the share of it that was really covered."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(COLOURS[name])
    own = [span for span in spans if span.name == name]
    shares = [span.seconds / (span.end_s - span.start_s) if span.end_s > span.start_s else 1.0 for span in own]
    return [(red, green, blue, min(max(share, 0.25), 1.0)) for share in shares]


def _time_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 3, 5, 6, 10]))
    if axes.get_xlim()[1] > 300:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{int(x) // 60}:{int(x) % 60:02d}"))
        axes.set_xlabel("minutes since the start")
    else:
        axes.set_xlabel("seconds since the start")


def _legend(axes: Axes, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Line2D([], [], color=RED, marker="x", linestyle="none", markeredgewidth=2, label="died")
        if name == "died"
        else Patch(color=COLOURS[name], label=label(name))
        for name in sorted(names, key=lambda name: [*COLOURS, "died"].index(name))
        if name != IDLE or WAIT not in names
    ]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=10, handlelength=0.9, columnspacing=1.1
    )
