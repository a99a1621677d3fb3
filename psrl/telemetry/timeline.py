"""Who was busy when: each process appends its spans to a file of its own, about every 30 seconds.

Times are the process's monotonic clock; the offset to the coordinator's clock, measured at hello, is written beside
them, so that spans of different nodes line up without trusting anyone's wall clock. `timeline_read` puts them together.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# What an instance does, ...
BUSY = "busy"  # decoding
IDLE = "idle"  # nothing to decode
PULL = "pull"  # new weights arrive while decoding goes on; attributes: version, nbytes
SWITCH = "switch"  # decoding stands still for the new weights; attributes: version, work since the last one
SLEEP = "sleep"  # GPU memory is released for the other side's turn (a trainer rank does both, too)
WAKE = "wake"  # ... and taken again
# ... and what a trainer rank does.
WAIT = "wait"
READ = "read"
UPDATE = "update"
PUSH = "push"
CHECKPOINT = "checkpoint"

WORK = (
    "decode_steps",
    "generated_tokens",
    "decode_kv_tokens",
    "prompt_tokens",
    "prefills",
    "prefill_s",
    "busy_s",
    "prefix_hit_tokens",
)
"""Counters of an engine (EngineStats) that each switch has as attributes, as differences to the switch before."""

COALESCE_GAP_S = 0.02
"""Spans of one name closer than this become one: a decode step lasts milliseconds, and a line for each is of no use."""
MAX_SPANS_A_FLUSH = 600
MAX_BUFFERED = 20_000


@dataclass(frozen=True, slots=True)
class Span:
    """Something that went on from `start_s` to `end_s`, really for `seconds` of it (less after coalescing)."""

    name: str
    start_s: float
    end_s: float
    seconds: float = -1.0
    attributes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seconds < 0:
            object.__setattr__(self, "seconds", self.end_s - self.start_s)


def merge(spans: Iterable[Span], gap_s: float) -> list[Span]:
    """Spans of one name with at most `gap_s` between them become one; sorted by start. Covered seconds add up, so
    `busy_fraction` stays true whatever the gap. A span with attributes stays alone.

    `merge([Span("busy", 0, 1), Span("busy", 1.5, 2)], 0.5) == [Span("busy", 0, 2, seconds=1.5)]`
    """
    done: list[Span] = []
    last: dict[str, int] = {}
    for span in sorted(spans, key=lambda s: s.start_s):
        index = last.get(span.name)
        if index is not None and not span.attributes and span.start_s - done[index].end_s <= gap_s:
            done[index] = _joined(done[index], span)
            continue
        done.append(span)
        if not span.attributes:
            last[span.name] = len(done) - 1
    return done


def coarsen(spans: Sequence[Span], most: int, gap_s: float = COALESCE_GAP_S) -> list[Span]:
    """Merge with growing gaps until at most `most` spans are left, or nothing more can be merged."""
    out = list(spans)
    while len(out) > most:
        fewer = merge(out, gap_s)
        if len(fewer) == len(out) and gap_s > 3600:
            break
        out, gap_s = fewer, gap_s * 2
    return out


def busy_fraction(spans: Iterable[Span], window: tuple[float, float], names: Sequence[str] = (BUSY,)) -> float:
    """Share of `window` (start, end) that spans with one of these names cover, in [0, 1]; 0 for an empty window.
    Spans of one process do not overlap; a coalesced span counts in proportion."""
    start, end = window
    if end <= start:
        return 0.0
    return min(1.0, sum(seconds_in(span, window) for span in spans if span.name in names) / (end - start))


def seconds_in(span: Span, window: tuple[float, float]) -> float:
    """Covered seconds of `span` inside `window`."""
    extent = span.end_s - span.start_s
    overlap = min(span.end_s, window[1]) - max(span.start_s, window[0])
    if overlap <= 0 or extent <= 0:
        return 0.0
    return span.seconds * overlap / extent


class Timeline:
    """Records the spans of one process into `path` (under `timeline/`, one file a process name).

    Buffered in memory and appended as whole lines at most every `flush_interval_s` and at `close`; memory and file stay
    bounded (at most 600 spans a flush). `offset_s` turns this process's monotonic clock into the coordinator's; set it
    when Welcome arrives. A file that cannot be written costs the spans, never the run. Not thread-safe.
    """

    def __init__(
        self,
        path: Path,
        role: str,
        offset_s: float | None = None,
        *,
        name: str | None = None,
        attributes: dict[str, Any] | None = None,
        flush_interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._clock = clock
        self._flush_interval_s = flush_interval_s
        self._last_flush_s = clock()
        self._offset_s = offset_s
        self._spans: list[Span] = []
        self._last: dict[str, int] = {}
        self._dropped = 0
        self._failed = False
        who = {"role": role, "name": name or path.stem, "pid": os.getpid(), "attributes": attributes or {}}
        self._pending: list[dict[str, Any]] = [who | {"unix_s": wall(), "mono_s": self._last_flush_s}]

    def set_offset(self, offset_s: float) -> None:
        """Coordinator's clock minus ours, seconds."""
        self._offset_s = offset_s

    def add(self, name: str, start_s: float, end_s: float, **attributes: Any) -> None:
        """Record one span, in seconds of this process's monotonic clock; cheap enough for every decode step."""
        index = self._last.get(name)
        span = Span(name, start_s, end_s, attributes=attributes)
        if index is not None and not attributes and start_s - self._spans[index].end_s <= COALESCE_GAP_S:
            self._spans[index] = _joined(self._spans[index], span)
        elif len(self._spans) >= MAX_BUFFERED:
            self._dropped += 1
        else:
            self._spans.append(span)
            if not attributes:
                self._last[name] = len(self._spans) - 1
        if self._clock() - self._last_flush_s >= self._flush_interval_s:
            self.flush()

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[None]:
        """Record the body of a `with`, also when it raises."""
        start_s = self._clock()
        try:
            yield
        finally:
            self.add(name, start_s, self._clock(), **attributes)

    def flush(self) -> None:
        """Append what is buffered, as whole lines in one write."""
        self._last_flush_s = self._clock()
        if self._spans or self._dropped:
            spans = [_packed(span) for span in coarsen(self._spans, MAX_SPANS_A_FLUSH)]
            batch: dict[str, Any] = {"offset_s": self._offset_s, "spans": spans}
            self._pending.append(batch | ({"dropped": self._dropped} if self._dropped else {}))
        self._spans, self._last, self._dropped = [], {}, 0
        if not self._pending or self._failed:
            return
        data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in self._pending)
        self._pending = []
        try:
            _append(self._path, data)
        except OSError as error:
            self._failed = True
            logger.warning("timeline %s cannot be written (%s): the report will lack its spans", self._path, error)

    def close(self) -> None:
        self.flush()


def _joined(first: Span, second: Span) -> Span:
    end_s = max(first.end_s, second.end_s)
    return replace(first, end_s=end_s, seconds=min(first.seconds + second.seconds, end_s - first.start_s))


def _packed(span: Span) -> list[Any]:
    """[name, start, end] and, only where they say something, covered seconds and attributes; 0.1 ms is fine enough."""
    start_s, end_s, seconds = round(span.start_s, 4), round(span.end_s, 4), round(span.seconds, 4)
    packed: list[Any] = [span.name, start_s, end_s]
    if span.attributes:
        return [*packed, seconds, span.attributes]
    return packed if abs(seconds - (end_s - start_s)) < 2e-4 else [*packed, seconds]


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # an earlier writer was killed inside its line
            data = b"\n" + data
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
