"""What is refused of `psrl.rollout_coordination.sync_and_mig_strategy.*`."""

from __future__ import annotations

from psrl.config.errors import ConfigError
from psrl.config.schema import Config

PREFIX = "psrl.rollout_coordination.sync_and_mig_strategy"
METHODS = ("greedy", "status_based")
LOADS = ("request_num", "throughput", "kv_cache")
"""Indicators of how busy an instance is."""
SYNC_INDICATORS = (*LOADS, "hypothesis_test")


def check_sync(config: Config) -> None:
    """Raises ConfigError, one sentence, for a value or a combination that cannot be."""
    strategy = config.psrl.rollout_coordination.sync_and_mig_strategy
    _check_choice("method", strategy.method, METHODS)
    _check_choice("sync.indicator", strategy.sync.indicator, SYNC_INDICATORS)
    _check_choice("mig.indicator", strategy.mig.indicator, LOADS)
    _check_choice("mig.stop_indicator", strategy.mig.stop_indicator, LOADS)
    _check_least("check_interval_in_ms", strategy.check_interval_in_ms, 1)
    _check_least("sync.seamless_train_version", strategy.sync.seamless_train_version, 0)
    _check_least("sync.threshold", strategy.sync.threshold, 0)
    _check_least("mig.threshold", strategy.mig.threshold, 0)
    _check_least("mig.stop_threshold", strategy.mig.stop_threshold, 0)
    if strategy.method == "status_based":
        _check_status_based(config)
    if strategy.mig.enable:
        _check_migration(config)


def sync_warnings(config: Config) -> list[str]:
    """What has no effect."""
    strategy = config.psrl.rollout_coordination.sync_and_mig_strategy
    if strategy.method == "greedy" and strategy.sync.seamless_train_version > 0:
        return [
            f"{PREFIX}.sync.seamless_train_version={strategy.sync.seamless_train_version} has no effect with "
            f"{PREFIX}.method=greedy; use status_based"
        ]
    return []


def _check_status_based(config: Config) -> None:
    sync = config.psrl.rollout_coordination.sync_and_mig_strategy.sync
    if sync.threshold is None:
        raise ConfigError(
            f"{PREFIX}.method=status_based needs {PREFIX}.sync.threshold but it is null: give the "
            f"{sync.indicator} at which an instance pulls, or use method=greedy."
        )
    if sync.indicator != "request_num" and not config.psrl.status_collection.enable:
        raise ConfigError(
            f"{PREFIX}.sync.indicator={sync.indicator} goes by what instances report but psrl.status_collection.enable=False: "
            "set it to True, or use indicator=request_num."
        )
    if sync.indicator == "hypothesis_test" and not config.psrl.rollout_coordination.partial_rollout.enable:
        raise ConfigError(
            f"{PREFIX}.sync.indicator=hypothesis_test weighs what an interruption costs but "
            "psrl.rollout_coordination.partial_rollout.enable=False: set it to True, or use another indicator."
        )


def _check_migration(config: Config) -> None:
    mig = config.psrl.rollout_coordination.sync_and_mig_strategy.mig
    for name, value in (("threshold", mig.threshold), ("stop_threshold", mig.stop_threshold)):
        if value is None:
            raise ConfigError(
                f"{PREFIX}.mig.enable=True needs {PREFIX}.mig.{name} but it is null: give it a number, for example 5 "
                "(times the least busy) for threshold and 10 (requests) for stop_threshold."
            )
    if mig.threshold is not None and mig.threshold <= 1:
        raise ConfigError(
            f"{PREFIX}.mig.threshold={mig.threshold:g} is refused: the busiest always has as much as the least busy; "
            "give more than 1."
        )
    for key, enabled in (
        ("psrl.status_collection.enable", config.psrl.status_collection.enable),
        ("psrl.rollout_coordination.partial_rollout.enable", config.psrl.rollout_coordination.partial_rollout.enable),
    ):
        if not enabled:
            raise ConfigError(f"{PREFIX}.mig.enable=True needs {key}=True: set it, or {PREFIX}.mig.enable=False.")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{PREFIX}.{name}={value} is refused: allowed is {' | '.join(allowed)}.")


def _check_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise ConfigError(f"{PREFIX}.{name}={value:g} is refused: it must be at least {least:g}.")
