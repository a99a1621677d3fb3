"""The virtual clock: what happens next, in order of time. Equal times keep the order in which they were set."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Clock:
    """A heap of calls. `now_s` moves only when a call is due.

    >>> clock, seen = Clock(), []
    >>> clock.at(2.0, seen.append, "b"); clock.at(1.0, seen.append, "a")
    >>> clock.run_next(); (clock.now_s, seen)
    (1.0, ['a'])
    """

    __slots__ = ("_heap", "_number", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], object]] = []
        self._number = 0

    def at(self, time_s: float, call: Callable[..., object], argument: object = 0) -> None:
        """`call(argument)` at `time_s`, now at the earliest."""
        self._number += 1
        heappush(self._heap, (max(time_s, self.now_s), self._number, call, argument))  # the number decides a tie

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_s(self) -> float | None:
        """Time of the next call, None if nothing is to come."""
        return self._heap[0][0] if self._heap else None

    def run_next(self) -> None:
        """Make every call that is due at the next time, also those that are set meanwhile for the same time."""
        now_s = self.now_s = self._heap[0][0]
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            _, _, call, argument = heappop(heap)
            call(argument)
