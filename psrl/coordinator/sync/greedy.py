"""Pull whenever a newer version is there."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.coordinator.sync.moment import Moment
from psrl.coordinator.views import InstanceView


class Greedy:
    whole_fleet = False

    def choose(self, lagging: Sequence[InstanceView], moment: Moment) -> list[InstanceView]:
        return list(lagging)
