"""random: any instance."""

from __future__ import annotations

import random
from collections.abc import Sequence

from psrl.coordinator.routing.base import Pool, Router, Work
from psrl.coordinator.routing.indexes import Members
from psrl.coordinator.views import InstanceView


class Random(Router):
    """Each that may take the work with the same probability; the same seed and history give the same sequence."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._members = Members()

    def update(self, view: InstanceView, free: int) -> None:
        self._members.update(view, free)

    def forget(self, view: InstanceView) -> None:
        self._members.forget(view)

    def choose(self, work: Work, pools: Sequence[Pool]) -> InstanceView | None:
        lists = [self._members.of(pool, work.num_samples) for pool in pools]
        total = sum(map(len, lists))
        if not total:
            return None
        at = self._random.randrange(total)
        for members in lists:
            if at < len(members):
                return members[at]
            at -= len(members)
        return None
