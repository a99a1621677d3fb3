"""When the samples of a busy instance are handed back, to be placed anew. Pure decisions and the memory that they need.

Migration is worth its price (every partial response is prefilled again) only if the load can really go elsewhere and if
it is not repeated before its effect can be seen. So there is one migration at a time, the next look waits until the last
one's samples are placed, and an instance that a migration did not relieve is left alone for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from psrl.coordinator.load import REQUEST_NUM, load, loads
from psrl.coordinator.views import InstanceView

HAND_BACK_S = 5.0
"""A migration counts as over after this long even if samples are still where they were: they were on their way there
when it was told to hand back, and stay."""
SETTLE_S = 1.0
"""Reported loads lag behind: they are believed again when they were reported this long after the samples were placed."""
UNRELIEVED_S = 10.0
"""An instance that is still far the busiest after its migration is not migrated from again for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSettings:
    """`psrl.rollout_coordination.sync_and_mig_strategy.mig`. Indicators: request_num | throughput | kv_cache."""

    indicator: str
    threshold: float
    stop_indicator: str
    stop_threshold: float

    @property
    def goes_by_reports(self) -> bool:
        return (self.indicator, self.stop_indicator) != (REQUEST_NUM, REQUEST_NUM)


def overloaded(view: InstanceView, least: float, settings: MigrationSettings) -> bool:
    """At least `threshold` times the least load, which counts as 1 below 1, and above `stop_threshold`.

    >>> by_number = MigrationSettings(indicator="request_num", threshold=5, stop_indicator="request_num", stop_threshold=10)
    >>> [overloaded(InstanceView("i", "", 64, in_flight=n), least, by_number) for n, least in ((10, 0), (11, 0), (11, 2), (11, 3))]
    [False, True, True, False]
    """
    return load(view, settings.stop_indicator) > settings.stop_threshold and load(
        view, settings.indicator
    ) >= settings.threshold * max(least, 1.0)


def to_relieve(
    views: Sequence[InstanceView],
    settings: MigrationSettings,
    *,
    may_give: Callable[[InstanceView], bool],
    may_take: Callable[[InstanceView], bool],
    newest_group: Callable[[], Mapping[str, int]],
) -> tuple[InstanceView, InstanceView] | None:
    """The busiest instance that some other one can relieve, and the least busy of those that can; None if nobody is.

    Only an instance that may serve every sample of the busy one is compared with it: `newest_group` gives the newest
    version of a group at each instance, and is asked only when loads are far apart. `may_take`: it has a free place.
    """
    by_load = loads(views, settings.indicator)
    least = max(1.0, min(by_load, default=0.0))
    busy_ones = [
        i
        for i, x in zip(views, by_load, strict=True)
        if x >= settings.threshold * least and overloaded(i, least, settings) and may_give(i)
    ]
    if not busy_ones:
        return None
    needs, load_of = newest_group(), dict(zip((i.name for i in views), by_load, strict=True))
    takers = sorted((i for i in views if may_take(i)), key=lambda i: (load_of[i.name], i.name))
    for busy in sorted(busy_ones, key=lambda i: (-load_of[i.name], i.name)):
        taker = next((i for i in takers if i is not busy and i.version >= needs.get(busy.name, 0)), None)
        if taker is not None and overloaded(busy, load_of[taker.name], settings):
            return busy, taker
    return None


class Migrations:
    """The one migration under way, and which instances the last ones did not relieve."""

    def __init__(self) -> None:
        self.source = ""
        self._here: dict[int, int] = {}
        """Samples, by group, that the source was told to hand back and has not yet."""
        self._over_by_s = 0.0
        self._placed_s = -SETTLE_S
        self._spared: dict[str, float] = {}
        """Instance -> when it may be migrated from again, whatever its load."""

    def begin(self, source: str, samples: Mapping[int, int], now_s: float) -> None:
        """`source` is told to hand back `samples`, given by group."""
        self.source, self._here = source, dict(samples)
        self._over_by_s = now_s + HAND_BACK_S
        self._spared[source] = now_s + UNRELIEVED_S

    def left(self, group: int, instance: str, count: int) -> None:
        """`count` samples of the group left `instance`, whichever way."""
        if instance == self.source and group in self._here:
            self._here[group] -= count
            if self._here[group] <= 0:
                del self._here[group]

    def forget(self, instance: str) -> None:
        """It is gone, or came anew."""
        self._spared.pop(instance, None)
        if instance == self.source:
            self._here.clear()

    def under_way(self, open_groups: Container[int], now_s: float) -> bool:
        """Whether samples have yet to leave the source."""
        if self.source and (now_s >= self._over_by_s or not any(group in open_groups for group in self._here)):
            self.source, self._placed_s = "", now_s
        return bool(self.source)

    def may_give(self, view: InstanceView, now_s: float) -> bool:
        return now_s >= self._spared.get(view.name, now_s)

    def note_relief(self, views: Sequence[InstanceView], settings: MigrationSettings) -> None:
        """An instance that was migrated from and is not overloaded any more may be migrated from again."""
        if self._spared:
            least = min(loads(views, settings.indicator), default=0.0)
            for view in views:
                if view.name in self._spared and not overloaded(view, least, settings):
                    del self._spared[view.name]

    def believed(self, views: list[InstanceView], settings: MigrationSettings) -> list[InstanceView]:
        """Those of whose load something is known that dates from after the last placement."""
        if not settings.goes_by_reports:
            return views
        since_s = self._placed_s + SETTLE_S
        return [i for i in views if i.reported_s >= since_s or not i.in_flight]
