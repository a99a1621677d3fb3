"""Reads what `timeline.Timeline` wrote and puts the spans of all processes on one clock."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psrl.telemetry.timeline import COALESCE_GAP_S, Span, merge

SAME_CLOCK_S = 5.0
"""Process starts whose estimates of the coordinator's clock (in Unix time) differ by less are on the same clock."""


@dataclass(frozen=True, slots=True)
class Track:
    """One start of one process. `base_s` + a span's time = Unix time; a process started again has another track."""

    role: str
    name: str
    base_s: float
    spans: list[Span]
    attributes: dict[str, Any] = field(default_factory=dict)


def read_timeline(directory: Path) -> list[Track]:
    """Tracks of all files in `timeline/`, sorted by role and name, times in Unix seconds. Torn lines are skipped."""
    tracks = [track for path in sorted(directory.glob("*.jsonl")) for track in read_tracks(path)]
    return sorted(align(tracks), key=lambda t: (t.role != "trainer", t.role, natural(t.name)))


def read_tracks(path: Path) -> list[Track]:
    """Tracks of one file, times still on the coordinator's monotonic clock (the process's own if it never met it)."""
    starts: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "role" in entry:
            starts.append((entry, []))
        elif isinstance(entry, dict) and "spans" in entry and starts:
            starts[-1][1].append(entry)
    return [_track(header, batches) for header, batches in starts]


def align(tracks: Sequence[Track]) -> list[Track]:
    """Spans moved to Unix time. Tracks whose clocks agree within 5 s share one base, so they keep their exact relative
    times; a job that went on elsewhere has another monotonic clock and gets a base of its own."""
    out: list[Track] = []
    cluster: list[Track] = []
    for track in sorted(tracks, key=lambda t: t.base_s):
        if cluster and track.base_s - cluster[-1].base_s > SAME_CLOCK_S:
            out += _moved(cluster)
            cluster = []
        cluster.append(track)
    return out + _moved(cluster)


def by_name(tracks: Iterable[Track], role: str) -> dict[str, list[Span]]:
    """Spans of every process of a role, by process name, over all its starts."""
    spans: dict[str, list[Span]] = {}
    for track in tracks:
        if track.role == role:
            spans.setdefault(track.name, []).extend(track.spans)
    return spans


def training_windows(tracks: Iterable[Track]) -> list[tuple[float, float]]:
    """For each start of the first trainer rank, (start of its first span, end of its last one): when steps were run."""
    trainers = [track for track in tracks if track.role == "trainer" and track.spans]
    first = min((track.name for track in trainers), key=natural, default="")
    return [
        (min(span.start_s for span in track.spans), max(span.end_s for span in track.spans))
        for track in trainers
        if track.name == first
    ]


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts instance-10 after instance-9."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _moved(cluster: list[Track]) -> list[Track]:
    if not cluster:
        return []
    base_s = cluster[len(cluster) // 2].base_s
    return [replace(track, base_s=base_s, spans=[_shifted(span, base_s) for span in track.spans]) for track in cluster]


def _track(header: dict[str, Any], batches: list[dict[str, Any]]) -> Track:
    known = [batch["offset_s"] for batch in batches if batch.get("offset_s") is not None]
    spans: list[Span] = []
    for batch in batches:
        # Before Welcome the offset was not known; the first one that was holds for the spans before it too.
        offset_s = batch["offset_s"] if batch.get("offset_s") is not None else (known[0] if known else 0.0)
        spans += [_shifted(_unpacked(packed), offset_s) for packed in batch["spans"]]
    base_s = header["unix_s"] - header["mono_s"] - (known[0] if known else 0.0)
    return Track(header["role"], header["name"], base_s, merge(spans, COALESCE_GAP_S), header.get("attributes") or {})


def _unpacked(packed: list[Any]) -> Span:
    name, start_s, end_s, *rest = packed
    return Span(name, start_s, end_s, rest[0] if rest else -1.0, rest[1] if len(rest) > 1 else {})


def _shifted(span: Span, by_s: float) -> Span:
    return replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s)
