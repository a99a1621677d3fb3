"""The coordinator's settings of sync and migration, out of the configuration."""

from __future__ import annotations

from psrl.config.schema import Config
from psrl.coordinator.migration import MigrationSettings
from psrl.coordinator.sync.settings import SyncSettings


def sync_settings(config: Config) -> SyncSettings:
    strategy = config.psrl.rollout_coordination.sync_and_mig_strategy
    return SyncSettings(
        method=strategy.method,
        indicator=strategy.sync.indicator,
        threshold=strategy.sync.threshold or 0.0,
        check_req_before_sync=strategy.sync.check_req_before_sync,
        seamless_train_version=strategy.sync.seamless_train_version,
        check_interval_s=strategy.check_interval_in_ms / 1000,
    )


def migration_settings(config: Config) -> MigrationSettings | None:
    """None: migration is off. A checked configuration has both thresholds."""
    mig = config.psrl.rollout_coordination.sync_and_mig_strategy.mig
    if not mig.enable or mig.threshold is None or mig.stop_threshold is None:
        return None
    return MigrationSettings(
        indicator=mig.indicator,
        threshold=mig.threshold,
        stop_indicator=mig.stop_indicator,
        stop_threshold=mig.stop_threshold,
    )
