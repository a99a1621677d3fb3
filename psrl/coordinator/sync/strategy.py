"""The protocol of a sync strategy, and what holds for each of them.

Never left to a strategy: an instance without weights or with those of an older incarnation always pulls, and so does one
that is behind and has nothing to do after all work has been handed out. The second rule is why no strategy can stop a run:
whoever is behind either has samples, which end, or pulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from psrl.coordinator.sync.moment import Moment
from psrl.coordinator.views import InstanceView


class SyncStrategy(Protocol):
    whole_fleet: bool
    """A decision about one instance depends on the others: ask only about all of them at once."""

    def choose(self, lagging: Sequence[InstanceView], moment: Moment) -> list[InstanceView]:
        """Those of `lagging` that shall pull now. Each is behind, serves this incarnation and may pull."""
        ...


def is_behind(view: InstanceView, version: int, incarnation: int) -> bool:
    """Not on these weights. A version of another incarnation is another version, however it is numbered."""
    return view.incarnation != incarnation or view.version < version


def may_pull(view: InstanceView, now_s: float) -> bool:
    """It stays, is awake, is not pulling already and has no failed pull just behind it."""
    return not (view.leaving or view.asleep) and view.pulling < 0 and now_s >= view.quarantined_until_s


def serves_nothing(view: InstanceView, incarnation: int) -> bool:
    """Its weights are of no use to anybody: there are none, or an older incarnation's."""
    return view.version < 0 or view.incarnation != incarnation


def pulls(strategy: SyncStrategy, lagging: Iterable[InstanceView], moment: Moment) -> list[InstanceView]:
    """Who pulls `moment.version` now, out of instances that are behind it."""
    must: list[InstanceView] = []
    others: list[InstanceView] = []
    for view in lagging:
        if may_pull(view, moment.now_s):
            (must if serves_nothing(view, moment.incarnation) else others).append(view)
    return [*must, *(strategy.choose(others, moment) if others else ())]


def idle_pulls(lagging: Iterable[InstanceView], now_s: float) -> list[InstanceView]:
    """Who pulls because nothing is there for it to do. Ask after waiting requests and new groups have been placed."""
    return [i for i in lagging if i.in_flight == 0 and may_pull(i, now_s)]
