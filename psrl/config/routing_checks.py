"""What is refused of `psrl.rollout_coordination.routing_strategy.*`."""

from __future__ import annotations

from psrl.config.coordination import CacheAwarePolicyConfig, RoutingStrategyConfig
from psrl.config.errors import ConfigError
from psrl.config.redundancy import redundant_sizes
from psrl.config.schema import Config

PREFIX = "psrl.rollout_coordination.routing_strategy"
BY_COST_MODEL = ("throughput_optimal", "throughput_optimal_with_budget")
CACHE_AWARE = ("cache_aware", "cache_aware_v1")
CHOICES = {
    "method": ("random", "round_robin", "request_num_balance", *BY_COST_MODEL, *CACHE_AWARE),
    "request_sort_indicator": ("small_id", "short_length", "long_length"),
    "candidate_sort_indicator": ("version", "reserve_capability"),
}
AT_LEAST = {
    "max_num_waiting_reqs_after_preemption": 0,
    "max_concurrent_seqs_per_instance": 1,
    "check_interval_in_ms": 1,
    "request_budget": 0,
    "cache_aware_policy.balance_abs_threshold": 0,
    "cache_aware_policy.balance_rel_threshold": 1,
    "cache_aware_policy.gpu_overlap_weight": 0,
    "cache_aware_policy.lmcache_overlap_weight": 0,
    "cache_aware_policy.eviction_interval_secs": 0,
    "cache_aware_policy.max_tree_size": 1,
    "cache_aware_policy.block_size": 1,
    "cache_aware_policy.kv_capacity_threshold": 1,
}
SHARES = (
    "delta_throughput_threshold",
    "cache_aware_policy.cache_threshold",
    "cache_aware_policy.balance_token_usage_threshold",
    "cache_aware_policy.overload_token_usage_threshold",
)
"""Values in [0, 1]."""


def check_routing(config: Config) -> None:
    """Raises ConfigError, one sentence, for a value or a combination that cannot be."""
    strategy = config.psrl.rollout_coordination.routing_strategy
    for name, allowed in CHOICES.items():
        if _value(strategy, name) not in allowed:
            raise ConfigError(f"{PREFIX}.{name}={_value(strategy, name)} is refused: allowed is {' | '.join(allowed)}.")
    for name, least in AT_LEAST.items():
        if not _value(strategy, name) >= least:
            raise ConfigError(f"{PREFIX}.{name}={_value(strategy, name)} is refused: it must be at least {least}.")
    for name in SHARES:
        if not 0 <= _value(strategy, name) <= 1:
            raise ConfigError(f"{PREFIX}.{name}={_value(strategy, name)} is refused: it is a share from 0 to 1.")
    _check_combinations(config, strategy)


def routing_warnings(config: Config) -> list[str]:
    """What has no effect, or another one than it seems."""
    strategy, p = config.psrl.rollout_coordination.routing_strategy, config.psrl
    warnings = []
    if not p.status_collection.enable:
        if strategy.admission_reject_on_waiting:
            warnings.append(
                f"{PREFIX}.admission_reject_on_waiting=True has no effect with psrl.status_collection.enable=False: "
                "nobody says that its queue waits"
            )
        if strategy.method in BY_COST_MODEL:
            warnings.append(
                f"{PREFIX}.method={strategy.method} counts only what was placed, not how it has grown, with "
                "psrl.status_collection.enable=False"
            )
    if strategy.cost_model_path is not None and strategy.method not in BY_COST_MODEL:
        warnings.append(f"{PREFIX}.cost_model_path has no effect with {PREFIX}.method={strategy.method}")
    if strategy.method not in CACHE_AWARE and strategy.cache_aware_policy != CacheAwarePolicyConfig():
        warnings.append(f"{PREFIX}.cache_aware_policy has no effect with {PREFIX}.method={strategy.method}")
    return warnings


def _check_combinations(config: Config, strategy: RoutingStrategyConfig) -> None:
    if strategy.method in BY_COST_MODEL and strategy.cost_model_path is None:
        raise ConfigError(
            f"{PREFIX}.method={strategy.method} needs {PREFIX}.cost_model_path but it is null: name a JSON file or a shipped "
            "cost model such as qwen_7b, or use method=request_num_balance."
        )
    if strategy.method in CACHE_AWARE and not config.psrl.status_collection.enable:
        raise ConfigError(
            f"{PREFIX}.method={strategy.method} goes by the KV usage that instances report but "
            "psrl.status_collection.enable=False: set it to True, or use another method."
        )
    policy = strategy.cache_aware_policy
    if policy.balance_token_usage_threshold > policy.overload_token_usage_threshold:
        raise ConfigError(
            f"{PREFIX}.cache_aware_policy.balance_token_usage_threshold={policy.balance_token_usage_threshold} is above "
            f"overload_token_usage_threshold={policy.overload_token_usage_threshold}: an instance is full before it is "
            "overloaded, so give at most that."
        )
    if policy.lmcache_overlap_weight > 0 and not config.psrl.lmcache.enable:
        raise ConfigError(
            f"{PREFIX}.cache_aware_policy.lmcache_overlap_weight={policy.lmcache_overlap_weight} counts tokens in an offload "
            "tier but psrl.lmcache.enable=False: use 0, or switch it on."
        )
    most = config.gen_actor_rollout_ref.rollout.max_num_seqs
    if (samples := redundant_sizes(config).launched_samples) > most:
        raise ConfigError(
            f"A group of {samples} samples is more than gen_actor_rollout_ref.rollout.max_num_seqs={most}: no "
            "instance could take a group."
        )


def _value(strategy: RoutingStrategyConfig, name: str):
    part, _, rest = name.rpartition(".")
    return getattr(getattr(strategy, part) if part else strategy, rest)
