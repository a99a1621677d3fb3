"""Pull when the instance has little left to lose by it: its load is down to a threshold."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.coordinator.load import loads
from psrl.coordinator.sync.moment import Moment
from psrl.coordinator.sync.settings import SyncSettings
from psrl.coordinator.views import InstanceView


class StatusBased:
    """`threshold` is in the unit of `indicator`: samples, tokens a second, percent of the KV cache.

    >>> strategy = StatusBased(SyncSettings(indicator="request_num", threshold=2))
    >>> few, many = InstanceView("a", "", 8, version=0, in_flight=2), InstanceView("b", "", 8, version=0, in_flight=3)
    >>> [i.name for i in strategy.choose([few, many], Moment(version=1, incarnation=0, now_s=0.0))]
    ['a']
    """

    whole_fleet = False

    def __init__(self, settings: SyncSettings) -> None:
        self.settings = settings

    def choose(self, lagging: Sequence[InstanceView], moment: Moment) -> list[InstanceView]:
        by_load = loads(lagging, self.settings.indicator)
        low = [i for i, x in zip(lagging, by_load, strict=True) if x <= self.settings.threshold]
        return unhindered(self.settings, low, moment)


def unhindered(settings: SyncSettings, lagging: Sequence[InstanceView], moment: Moment) -> list[InstanceView]:
    """Those whom neither `seamless_train_version` nor `check_req_before_sync` holds back.

    A waiting request holds back only an instance that may take it: one of the request's version or newer, with a free
    place. Any other is of no use to the request before it has pulled.
    """
    if moment.version < settings.seamless_train_version and not moment.next_ready:
        return []
    if not settings.check_req_before_sync or not moment.waiting:
        return list(lagging)
    served = {version for version in {i.version for i in lagging} if moment.waiting_for(version)}
    return [i for i in lagging if i.version not in served or not moment.free_slots(i)]
