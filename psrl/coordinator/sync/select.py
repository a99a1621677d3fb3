"""The strategy that the settings name."""

from __future__ import annotations

from psrl.coordinator.sync.greedy import Greedy
from psrl.coordinator.sync.hypothesis_test import HypothesisTest
from psrl.coordinator.sync.settings import SyncSettings
from psrl.coordinator.sync.status_based import StatusBased
from psrl.coordinator.sync.strategy import SyncStrategy


def make_sync(settings: SyncSettings) -> SyncStrategy:
    """Raises ValueError for a method that does not exist."""
    if settings.method == "greedy":
        return Greedy()
    if settings.method == "status_based":
        return HypothesisTest(settings) if settings.indicator == "hypothesis_test" else StatusBased(settings)
    raise ValueError(f"psrl.rollout_coordination.sync_and_mig_strategy.method={settings.method} does not exist")
