"""The parts of a buffer as the coordinator hands them over, and what the rank did in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from psrl.protocol import control as c
from psrl.protocol.samples import Group
from psrl.trainer.chunks import Chunk, Part
from psrl.trainer.feed import Order


class InterruptedStepError(Exception):
    """The rest of the buffer does not come: `order` says what to do instead."""

    def __init__(self, order: Order) -> None:
        super().__init__(f"{type(order).__name__} in the middle of a buffer")
        self.order = order


@dataclass(slots=True)
class Work:
    """The rank was busy from `start_s` to `end_s` (monotonic), of which it read samples for `read_s`."""

    start_s: float
    end_s: float
    read_s: float = 0.0


class Arrivals:
    """Iterate over it once: each part when it is there. `first` is the answer for the first chunk; `ask(taken, count)` gets
    the next, the same on every rank. Raises InterruptedStepError when it is no part of the buffer."""

    def __init__(self, first: c.Buffer, chunks: Sequence[Chunk], ask: Callable[[int, int], Order]) -> None:
        self.buffer = first.buffer
        self.newest = first
        """The last message; its counters and `filled_s` are the newest."""
        self.groups: list[c.TakenGroup] = []
        """All groups so far, in batch order."""
        self.work: list[Work] = []
        self.waits: list[tuple[float, float]] = []
        self._chunks = chunks
        self._ask = ask

    def __iter__(self) -> Iterator[Part]:
        samples = 0
        for chunk in self._chunks:
            new: Sequence[c.TakenGroup] = ()
            if chunk.groups > len(self.groups) and not (self.groups and self.newest.last):
                new = self._next(chunk.groups).groups
                self.groups += new
                samples += sum(len(group.ref.tokens) for group in new)
            limit = min(chunk.samples, samples)
            last = self.newest.last and limit == samples
            self.work.append(Work(now := time.monotonic(), now))
            yield Part(new, limit, last)
            self.work[-1].end_s = time.monotonic()
            if last:
                return

    def _next(self, groups: int) -> c.Buffer:
        if not self.groups:
            return self.newest
        begun = time.monotonic()
        order = self._ask(len(self.groups), groups - len(self.groups))
        self.waits.append((begun, time.monotonic()))
        if not isinstance(order, c.Buffer):
            raise InterruptedStepError(order)
        self.newest = order
        return order

    def timed_read(self, read: Callable[[c.TakenGroup], Group]) -> Callable[[c.TakenGroup], Group]:
        """`read`, with its time in the current `work`."""

        def timed(taken: c.TakenGroup) -> Group:
            begun = time.monotonic()
            group = read(taken)
            self.work[-1].read_s += time.monotonic() - begun
            return group

        return timed

    def end(self) -> None:
        """The step is done: what came after the last part was work on it."""
        self.work[-1].end_s = time.monotonic()

    @property
    def read_s(self) -> float:
        return sum(work.read_s for work in self.work)

    @property
    def work_s(self) -> float:
        return sum(work.end_s - work.start_s for work in self.work)

    @property
    def wait_s(self) -> float:
        return sum(end - start for start, end in self.waits)
