"""Which groups must hurry because the trainer waits for its buffer. Pure; remembers only what it has asked for.

It acts on buffer v alone, while the trainer waits for it, once enough of it is filled: the oldest groups, as many as are
missing, are aborted and made again (retry) or ended as they are (truncate). Each group is asked once; a prompt that came
back for giving way is left alone, and so are groups that began after the buffer was that full: those that replace what
was dropped would else be ended before their first token, one after the other.
"""

from __future__ import annotations

from psrl.coordinator.staleness import Staleness

RETRY = "retry"


class StragglerWatch:
    """`threshold`: share of the buffer that must be filled, in (0, 1); `method` None never acts."""

    __slots__ = ("_asked", "_buffer", "_limit", "_retried", "method", "threshold")

    def __init__(self, method: str | None, threshold: float | None) -> None:
        self.method = method
        self.threshold = 1.0 if threshold is None else threshold
        self._buffer = (-1, -1)
        self._limit = 0
        self._asked: set[int] = set()
        self._retried = 0

    def choose(self, state: Staleness, wanted_buffer: int) -> list[int]:
        """Groups to act on now, the oldest first; `wanted_buffer` is what the trainer waits for, -1 if nothing."""
        buffer, capacity = state.version, state.capacity(state.version)
        filled = state.filled(buffer)
        if self.method is None or wanted_buffer != buffer or not self.threshold * capacity <= filled < capacity:
            return []
        if self._buffer != (state.incarnation, buffer):
            self._buffer, self._limit = (state.incarnation, buffer), state.next_group
            self._asked = {group for group in self._asked if state.is_open(group)}
            self._retried = 0
        # Whoever was truncated is about to fill a place, or is gone for good; whoever is made again will come later.
        hurrying = self._retried if self.method == RETRY else sum(state.is_open(group) for group in self._asked)
        free = [
            r.group
            for r in state.open_groups()
            if r.group < self._limit and r.group not in self._asked and not (self.method == RETRY and r.protected)
        ]
        chosen = free[: max(0, capacity - filled - hurrying)]
        self._asked.update(chosen)
        self._retried += len(chosen)
        return chosen
