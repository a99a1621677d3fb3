"""The keys of sync and migration: what is refused, and what of them reaches the coordinator."""

from __future__ import annotations

from functools import cache

import pytest
from omegaconf import DictConfig, OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.configured_sync import migration_settings, sync_settings
from psrl.coordinator.migration import MigrationSettings
from psrl.coordinator.sync.settings import SyncSettings

pytestmark = pytest.mark.unit

KEY = "psrl.rollout_coordination.sync_and_mig_strategy"
STATUS = [f"{KEY}.method=status_based", f"{KEY}.sync.threshold=4"]
MIGRATE = [f"{KEY}.mig.enable=True", f"{KEY}.mig.threshold=5", f"{KEY}.mig.stop_threshold=10"]
NO_STATUS = "psrl.status_collection.enable=False"
NO_PARTIAL = "psrl.rollout_coordination.partial_rollout.enable=False"


@cache
def laptop() -> DictConfig:
    return compose_config(["preset=laptop", "task=chain_sum"])


def composed(*overrides: str) -> Config:
    return OmegaConf.to_object(OmegaConf.merge(laptop(), OmegaConf.from_dotlist(list(overrides))))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{KEY}.method=eager"], f"{KEY}.method=eager is refused: allowed is greedy | status_based"),
        ([f"{KEY}.method=status_based"], "needs .*sync.threshold but it is null: give the request_num at which"),
        ([*STATUS, f"{KEY}.sync.indicator=load"], "sync.indicator=load is refused: allowed is request_num | "),
        ([*STATUS, f"{KEY}.sync.threshold=-1"], "sync.threshold=-1 is refused: it must be at least 0"),
        ([f"{KEY}.sync.seamless_train_version=-1"], "seamless_train_version=-1 is refused: it must be at least 0"),
        ([f"{KEY}.check_interval_in_ms=0"], "check_interval_in_ms=0 is refused: it must be at least 1"),
        *(
            ([*STATUS, f"{KEY}.sync.indicator={name}", NO_STATUS], f"sync.indicator={name} goes by what instances report")
            for name in ("throughput", "kv_cache", "hypothesis_test")
        ),
        (
            [*STATUS, f"{KEY}.sync.indicator=hypothesis_test", NO_PARTIAL],
            "hypothesis_test weighs what an interruption costs but .*partial_rollout.enable=False",
        ),
        ([MIGRATE[0], MIGRATE[2]], "mig.enable=True needs .*mig.threshold but it is null"),
        ([MIGRATE[0], MIGRATE[1]], "mig.enable=True needs .*mig.stop_threshold but it is null"),
        ([*MIGRATE, NO_STATUS], "mig.enable=True needs psrl.status_collection.enable=True"),
        ([*MIGRATE, NO_PARTIAL], "mig.enable=True needs psrl.rollout_coordination.partial_rollout.enable=True"),
        ([*MIGRATE, f"{KEY}.mig.threshold=1"], "mig.threshold=1 is refused: .*give more than 1"),
        ([f"{KEY}.mig.threshold=-5"], "mig.threshold=-5 is refused: it must be at least 0"),
        ([*MIGRATE, f"{KEY}.mig.stop_threshold=-1"], "mig.stop_threshold=-1 is refused: it must be at least 0"),
        ([f"{KEY}.mig.indicator=hypothesis_test"], "mig.indicator=hypothesis_test is refused: allowed is request_num | "),
        ([f"{KEY}.mig.stop_indicator=bytes"], "mig.stop_indicator=bytes is refused: allowed is request_num | "),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(overrides: list[str], words: str) -> None:
    pattern = words if ".*" in words else words.replace("|", r"\|")
    with pytest.raises(ConfigError, match=pattern) as refusal:
        check(composed(*overrides))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        STATUS,
        [*STATUS, NO_STATUS],  # requests are counted by the coordinator itself
        [*STATUS, NO_PARTIAL],
        *([*STATUS, f"{KEY}.sync.indicator={name}"] for name in ("throughput", "kv_cache", "hypothesis_test")),
        [*STATUS, f"{KEY}.sync.threshold=0"],
        MIGRATE,
        [*MIGRATE, f"{KEY}.mig.indicator=kv_cache", f"{KEY}.mig.stop_indicator=throughput"],
    ],
)
def test_what_can_be_is_accepted_without_a_word(overrides: list[str]) -> None:
    assert not [warning for warning in check(composed(*overrides)) if KEY in warning]


def test_a_key_without_effect_is_warned_of() -> None:
    warnings = check(composed(f"{KEY}.sync.seamless_train_version=3"))
    assert len(warnings) == 1 and "seamless_train_version=3 has no effect with" in warnings[0]


def test_every_key_reaches_the_coordinator() -> None:
    config = composed(
        f"{KEY}.method=status_based",
        f"{KEY}.check_interval_in_ms=250",
        f"{KEY}.sync.indicator=kv_cache",
        f"{KEY}.sync.threshold=12.5",
        f"{KEY}.sync.check_req_before_sync=False",
        f"{KEY}.sync.seamless_train_version=7",
        f"{KEY}.mig.enable=True",
        f"{KEY}.mig.indicator=throughput",
        f"{KEY}.mig.threshold=5",
        f"{KEY}.mig.stop_indicator=kv_cache",
        f"{KEY}.mig.stop_threshold=60",
    )
    assert sync_settings(config) == SyncSettings(
        method="status_based",
        indicator="kv_cache",
        threshold=12.5,
        check_req_before_sync=False,
        seamless_train_version=7,
        check_interval_s=0.25,
    )
    assert migration_settings(config) == MigrationSettings(
        indicator="throughput", threshold=5, stop_indicator="kv_cache", stop_threshold=60
    )


def test_the_shipped_defaults() -> None:
    config = composed()
    assert sync_settings(config) == SyncSettings(method="greedy", check_interval_s=0.1)
    assert migration_settings(config) is None
