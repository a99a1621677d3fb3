"""The instances as a router sees them: who is there, what changed since the last choice, which pools there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psrl.coordinator.load import free_slots
from psrl.coordinator.routing.base import Pool, Router, Work, pool_of
from psrl.coordinator.views import InstanceView


class Fleet:
    """Every change of a view that was added is noted by the view itself; a choice first passes on what was noted, so its
    cost follows the number of changes and not the size of the fleet.

    `limit`: most samples at one instance; `reject_on_waiting`: nothing for one whose own queue waits; `samples_per_group`: as
    many at once are a new group.
    """

    def __init__(self, router: Router, *, limit: int, reject_on_waiting: bool, samples_per_group: int = 1) -> None:
        self.router = router
        self.samples_per_group = samples_per_group
        self.limit = limit
        self.reject_on_waiting = reject_on_waiting
        self._views: dict[str, InstanceView] = {}
        self._noted: dict[str, InstanceView] = {}
        self._pool_of: dict[str, Pool] = {}
        self._pools: Counter[Pool] = Counter()

    def add(self, view: InstanceView) -> None:
        if known := self._views.get(view.name):
            self.remove(known)
        self._views[view.name] = self._noted[view.name] = view
        view.noted = self._noted

    def remove(self, view: InstanceView) -> None:
        view.noted = None
        self._noted.pop(view.name, None)
        if self._views.pop(view.name, None) is not None:
            self._leave_pool(view.name)
            self.router.forget(view)

    def versions(self, incarnation: int) -> list[int]:
        """Versions that some instance serves, the newest first."""
        self._settle()
        return sorted((v for i, v in self._pools if i == incarnation and v >= 0), reverse=True)

    def choose(self, work: Work, incarnation: int, versions: Sequence[int]) -> InstanceView | None:
        """An instance for `work` with weights of one of `versions`, which are in order of preference among equals."""
        self._settle()
        return self.router.choose(work, [(incarnation, version) for version in versions])

    def may_take(self, view: InstanceView, num_samples: int) -> bool:
        return free_slots(view, self.limit, self.reject_on_waiting) >= num_samples

    def _settle(self) -> None:
        if not self._noted:
            return
        changed = list(self._noted.items())
        self._noted.clear()
        for name, view in changed:
            pool = pool_of(view)
            if self._pool_of.get(name) != pool:
                self._leave_pool(name)
                self._pool_of[name] = pool
                self._pools[pool] += 1
            self.router.update(view, self._free(view))

    def _free(self, view: InstanceView) -> int:
        """Samples that may go there now. One that is sated takes single ones still, but no group."""
        if view.full:
            return 0
        free = free_slots(view, self.limit, self.reject_on_waiting)
        return min(free, self.samples_per_group - 1) if view.sated else free

    def _leave_pool(self, name: str) -> None:
        if (pool := self._pool_of.pop(name, None)) is not None:
            self._pools[pool] -= 1
            if not self._pools[pool]:
                del self._pools[pool]
