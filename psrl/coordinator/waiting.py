"""Samples that look for an instance to go on at: who is first. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

SMALL_ID, SHORT_LENGTH, LONG_LENGTH = "small_id", "short_length", "long_length"


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """One sample on the move. `version` is its group's: only instances with these weights or newer ones may have it."""

    agent: str
    group: int
    sample: int
    version: int
    since_s: float
    tokens: int = 0
    """Response tokens so far."""
    came_from: str = ""
    """The instance that it was at, "" if that is unknown or bygone."""
    blocks: tuple[int, ...] = ()
    """Names of its whole cache blocks, prompt included, if its agent loop gave them."""
    turn: bool = False
    """It is back from its environment and wants its next turn."""
    unbound: bool = False
    """It was moved away on purpose: no kind of stickiness holds until it is placed again."""


class WaitingQueue:
    """Each (group, sample) waits once at most; asking again replaces what was asked before but keeps its place in time.

    `sort`: small_id (oldest group first) | short_length | long_length (response tokens so far); equal ones in order of
    asking. With `oldest_version_first` that order holds among groups of one version only.

    >>> queue = WaitingQueue(LONG_LENGTH)
    >>> for sample, tokens in enumerate((5, 9)):
    ...     queue.add(Waiting(agent="a", group=0, sample=sample, version=0, since_s=0.0, tokens=tokens))
    >>> queue.first(below=1, waiting_since_s=-1.0).sample
    1
    """

    def __init__(self, sort: str = SMALL_ID, oldest_version_first: bool = False) -> None:
        self._sort = sort
        self._oldest_version_first = oldest_version_first
        self._live: dict[tuple[int, int], Waiting] = {}
        self._heaps: dict[int, list[tuple[int, int, Waiting]]] = {}
        self._by_time: dict[int, deque[Waiting]] = {}
        self._asked = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._live.values())

    def clear(self) -> None:
        self._live.clear()
        self._heaps.clear()
        self._by_time.clear()

    def add(self, waiting: Waiting) -> None:
        key = (waiting.group, waiting.sample)
        if before := self._live.get(key):
            waiting.since_s = before.since_s
        self._live[key] = waiting
        self._asked += 1
        heappush(self._heaps.setdefault(waiting.version, []), (self._rank(waiting), self._asked, waiting))
        self._by_time.setdefault(waiting.version, deque()).append(waiting)

    def forget(self, agent: str) -> None:
        """All that this agent loop asked for."""
        for waiting in [w for w in self if w.agent == agent]:
            self.remove(waiting)

    def remove(self, waiting: Waiting) -> None:
        if self._is_live(waiting):
            del self._live[waiting.group, waiting.sample]

    def first(self, *, below: float, waiting_since_s: float) -> Waiting | None:
        """Who is next among groups of a version below `below`: whoever has waited since `waiting_since_s` or longer (the
        longest first, so nobody is passed over for ever), then by the order of this queue."""
        longest: Waiting | None = None
        best: tuple[int, int, int, Waiting] | None = None
        for version in [v for v in self._heaps if v < below]:
            heap, by_time = self._heaps[version], self._by_time[version]
            while heap and not self._is_live(heap[0][2]):
                heappop(heap)
            while by_time and not self._is_live(by_time[0]):
                by_time.popleft()
            if not heap:
                del self._heaps[version], self._by_time[version]
                continue
            if by_time[0].since_s <= waiting_since_s and (longest is None or by_time[0].since_s < longest.since_s):
                longest = by_time[0]
            entry = (version if self._oldest_version_first else 0, *heap[0])
            if best is None or entry < best:
                best = entry
        return longest or (best[3] if best else None)

    def _is_live(self, waiting: Waiting) -> bool:
        return self._live.get((waiting.group, waiting.sample)) is waiting

    def _rank(self, waiting: Waiting) -> int:
        if self._sort == SMALL_ID:
            return waiting.group
        return waiting.tokens if self._sort == SHORT_LENGTH else -waiting.tokens
