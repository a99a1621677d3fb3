"""round_robin: each instance in turn."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.coordinator.routing.base import Pool, Router, Work
from psrl.coordinator.routing.indexes import LeastFirst
from psrl.coordinator.views import InstanceView


class RoundRobin(Router):
    """Whose last turn is longest ago, by name at the beginning. One that could take nothing for a while is next."""

    def __init__(self) -> None:
        self._turns = 0
        self._last_turn: dict[str, int] = {}
        self._longest_ago = LeastFirst(lambda view: self._last_turn.get(view.name, 0))

    def update(self, view: InstanceView, free: int) -> None:
        self._longest_ago.update(view, free)

    def forget(self, view: InstanceView) -> None:
        self._longest_ago.forget(view)
        self._last_turn.pop(view.name, None)

    def choose(self, work: Work, pools: Sequence[Pool]) -> InstanceView | None:
        found = [view for pool in pools if (view := self._longest_ago.first(pool, work.num_samples))]
        return min(found, key=lambda view: (self._last_turn.get(view.name, 0), view.name), default=None)

    def placed(self, view: InstanceView, work: Work) -> None:
        """A turn is whatever goes there. The change of its load, which follows, brings the index up to date."""
        self._turns += 1
        self._last_turn[view.name] = self._turns
