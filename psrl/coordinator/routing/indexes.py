"""Indexes of a fleet: who comes first, who is a member. A change costs O(log n) or O(1), a look likewise.

Both answer for one pool and a *need*, the free places that an instance must have. Samples come one at a time or a whole
group at a time, so there are two or three needs; each gets a structure of its own when it is first asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from psrl.coordinator.routing.base import Pool, pool_of
from psrl.coordinator.views import InstanceView


class _Known(NamedTuple):
    view: InstanceView
    pool: Pool
    key: float
    free: int


class LeastFirst:
    """The instance with the least key, equal ones by name. Heaps with lazy deletion: a change pushes a new entry, an old
    one is recognised by not saying what is known when it comes up."""

    def __init__(self, key: Callable[[InstanceView], float]) -> None:
        self._key = key
        self._known: dict[str, _Known] = {}
        self._members: Counter[Pool] = Counter()
        self._needs: set[int] = set()
        self._heaps: dict[tuple[Pool, int], list[tuple[float, str]]] = {}

    def update(self, view: InstanceView, free: int) -> None:
        now = _Known(view, pool_of(view), self._key(view), free)
        before = self._known.get(view.name)
        self._known[view.name] = now
        if before is None or before.pool != now.pool:
            self._members[now.pool] += 1
            self._leave(before)
        for need in self._needs:
            if free >= need and (
                before is None or before.pool != now.pool or before.key != now.key or before.free < need
            ):
                self._push(now, need)

    def forget(self, view: InstanceView) -> None:
        self._leave(self._known.pop(view.name, None))

    def first(self, pool: Pool, need: int) -> InstanceView | None:
        if need not in self._needs:
            self._needs.add(need)
            for known in self._known.values():
                if known.free >= need:
                    self._push(known, need)
        heap = self._heaps.get((pool, need))
        while heap:
            if self._holds(heap[0], pool, need):
                return self._known[heap[0][1]].view
            heappop(heap)
        return None

    def _holds(self, entry: tuple[float, str], pool: Pool, need: int) -> bool:
        known = self._known.get(entry[1])
        return known is not None and known.key == entry[0] and known.free >= need and known.pool == pool

    def _push(self, known: _Known, need: int) -> None:
        heap = self._heaps.setdefault((known.pool, need), [])
        heappush(heap, (known.key, known.view.name))
        if len(heap) > 4 * self._members[known.pool] + 64:  # pays for itself: as many changes came before
            heap[:] = {entry for entry in heap if self._holds(entry, known.pool, need)}
            heapify(heap)

    def _leave(self, before: _Known | None) -> None:
        if before is None:
            return
        self._members[before.pool] -= 1
        if not self._members[before.pool]:
            del self._members[before.pool]
            for need in self._needs:
                self._heaps.pop((before.pool, need), None)


class Members:
    """All instances that qualify, in lists, to draw from."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[InstanceView, int]] = {}
        self._needs: set[int] = set()
        self._lists: dict[tuple[Pool, int], list[InstanceView]] = {}
        self._at: dict[tuple[str, int], tuple[Pool, int]] = {}
        """(name, need) -> pool and place in its list."""

    def update(self, view: InstanceView, free: int) -> None:
        self._known[view.name] = (view, free)
        for need in self._needs:
            self._set(view, need, free >= need)

    def forget(self, view: InstanceView) -> None:
        self._known.pop(view.name, None)
        for need in self._needs:
            self._set(view, need, False)

    def of(self, pool: Pool, need: int) -> list[InstanceView]:
        """Not to be changed, and valid until the next update."""
        if need not in self._needs:
            self._needs.add(need)
            for view, free in self._known.values():
                self._set(view, need, free >= need)
        return self._lists.get((pool, need), [])

    def _set(self, view: InstanceView, need: int, member: bool) -> None:
        at, pool = self._at.get((view.name, need)), pool_of(view)
        if at is not None and not (member and at[0] == pool and self._lists[pool, need][at[1]] is view):
            del self._at[view.name, need]
            members = self._lists[at[0], need]
            last = members.pop()
            if last.name != view.name:
                members[at[1]] = last
                self._at[last.name, need] = at
            if not members:
                del self._lists[at[0], need]
            at = None
        if member and at is None:
            members = self._lists.setdefault((pool, need), [])
            self._at[view.name, need] = (pool, len(members))
            members.append(view)
