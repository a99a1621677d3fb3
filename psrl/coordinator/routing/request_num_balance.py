"""request_num_balance: the instance with the fewest samples in flight."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.coordinator.routing.base import Pool, Router, Work
from psrl.coordinator.routing.indexes import LeastFirst
from psrl.coordinator.views import InstanceView


class RequestNumBalance(Router):
    """Equal ones: the earlier pool, then the name. O(log n) a choice.

    >>> router = RequestNumBalance()
    >>> for name, in_flight in (("a", 3), ("b", 1), ("c", 1)):
    ...     router.update(InstanceView(name, "", 8, version=0, in_flight=in_flight), 8 - in_flight)
    >>> router.choose(Work(4), [(0, 0)]).name
    'b'
    """

    def __init__(self) -> None:
        self._least = LeastFirst(lambda view: view.in_flight)

    def update(self, view: InstanceView, free: int) -> None:
        self._least.update(view, free)

    def forget(self, view: InstanceView) -> None:
        self._least.forget(view)

    def choose(self, work: Work, pools: Sequence[Pool]) -> InstanceView | None:
        found = [view for pool in pools if (view := self._least.first(pool, work.num_samples))]
        return min(found, key=lambda view: view.in_flight, default=None)
