"""The coordinator's routing out of the configuration: the method, how work is ordered, what is known of prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from psrl.config.cache_blocks import cache_block_size
from psrl.config.routing_checks import BY_COST_MODEL
from psrl.config.schema import Config
from psrl.coordinator.placing import PlacingSettings, PromptFacts
from psrl.coordinator.routing.base import Router
from psrl.coordinator.routing.cache_aware import CacheAware
from psrl.coordinator.routing.cache_aware_v1 import CacheAwareV1
from psrl.coordinator.routing.cache_settings import CacheSettings
from psrl.coordinator.routing.random_choice import Random
from psrl.coordinator.routing.request_num_balance import RequestNumBalance
from psrl.coordinator.routing.round_robin import RoundRobin
from psrl.coordinator.routing.throughput_optimal import ThroughputOptimal, ThroughputOptimalWithBudget
from psrl.cost_model.files import load_cost_model, parallel_key
from psrl.protocol.blocks import block_names
from psrl.protocol.cost_model import CostModel
from psrl.tasks.prepared import PreparedReader

KNOWN_PROMPTS = 65536
"""Prompts whose facts are kept in memory; others are read again."""


def make_router(config: Config) -> Router:
    """The method that the configuration names. Raises ConfigError for a cost model that is missing or damaged."""
    strategy = config.psrl.rollout_coordination.routing_strategy
    match strategy.method:
        case "request_num_balance":
            return RequestNumBalance()
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(config.seed)
        case "throughput_optimal":
            return ThroughputOptimal(routing_cost_model(config), strategy.delta_throughput_threshold)
        case "throughput_optimal_with_budget":
            return ThroughputOptimalWithBudget(routing_cost_model(config), strategy.delta_throughput_threshold)
        case "cache_aware":
            return CacheAware(cache_settings(config))
        case "cache_aware_v1":
            return CacheAwareV1(cache_settings(config))
    raise ValueError(f"psrl.rollout_coordination.routing_strategy.method={strategy.method} has no router")


def check_cost_model(config: Config) -> None:
    """Raises ConfigError if the cost model that routing needs is not there or lacks this run's parallelism."""
    if config.psrl.rollout_coordination.routing_strategy.method in BY_COST_MODEL:
        routing_cost_model(config)


def routing_cost_model(config: Config) -> CostModel:
    """The entry of `cost_model_path` for this run's parallelism: TP is the GPUs of an instance on one node, PP its nodes."""
    deployment = config.psrl.deployment
    key = parallel_key(deployment.rollout_ngpus_per_node_per_instance, deployment.rollout_nnodes_per_instance)
    path = config.psrl.rollout_coordination.routing_strategy.cost_model_path
    assert path is not None  # psrl.config.routing_checks refuses null
    return load_cost_model(path, key)


def cache_settings(config: Config) -> CacheSettings:
    policy = config.psrl.rollout_coordination.routing_strategy.cache_aware_policy
    return CacheSettings(
        cache_threshold=policy.cache_threshold,
        gpu_weight=policy.gpu_overlap_weight,
        offload_weight=policy.lmcache_overlap_weight,
        balance_abs=policy.balance_abs_threshold,
        balance_rel=policy.balance_rel_threshold,
        full_usage=policy.balance_token_usage_threshold,
        overload_usage=policy.overload_token_usage_threshold,
        tidy_interval_s=policy.eviction_interval_secs,
        max_tokens=policy.max_tree_size,
        block_size=policy.block_size,
        max_capacities=policy.kv_capacity_threshold,
    )


def make_placing(config: Config) -> PlacingSettings:
    strategy = config.psrl.rollout_coordination.routing_strategy
    return PlacingSettings(
        sort=strategy.request_sort_indicator,
        oldest_version_first=strategy.enable_multi_priority_queue,
        candidates=strategy.candidate_sort_indicator,
        group_sticky=strategy.enable_group_sticky,
        trajectory_sticky=strategy.enable_trajectory_sticky,
        check_interval_s=strategy.check_interval_in_ms / 1000,
        request_budget=strategy.request_budget,
    )


def prompt_facts(prompts: PreparedReader, config: Config) -> Callable[[int], PromptFacts]:
    """Facts of a prompt by its index. Two prompts share a block name where all their tokens up to its end are the same."""
    block_size = cache_block_size(config)

    @lru_cache(maxsize=KNOWN_PROMPTS)
    def facts(index: int) -> PromptFacts:
        prompt = prompts[index]
        ids = np.frombuffer(prompt.prompt_ids, dtype="<i4")
        return PromptFacts(len(ids), prompt.data_source, tuple(block_names(ids, block_size)) if block_size else ())

    return facts
