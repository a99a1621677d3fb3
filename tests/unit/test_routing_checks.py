"""Every refusal and warning of psrl.rollout_coordination.routing_strategy.*."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config
from psrl.config.errors import ConfigError
from psrl.configured_routing import check_cost_model, make_router
from psrl.coordinator.routing.throughput_optimal import ThroughputOptimalWithBudget

pytestmark = pytest.mark.unit

S = "psrl.rollout_coordination.routing_strategy"
POLICY = f"{S}.cache_aware_policy"
NO_STATUS = "psrl.status_collection.enable=False"


def composed(*overrides: str):
    return OmegaConf.to_object(compose_config(["preset=laptop", "task=chain_sum", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{S}.method=best"], ["method=best", "cache_aware_v1"]),
        ([f"{S}.request_sort_indicator=big_id"], ["request_sort_indicator=big_id", "small_id | short_length | long_length"]),
        ([f"{S}.candidate_sort_indicator=name"], ["candidate_sort_indicator=name", "version | reserve_capability"]),
        ([f"{S}.check_interval_in_ms=0"], ["check_interval_in_ms=0", "at least 1"]),
        ([f"{S}.max_num_waiting_reqs_after_preemption=-1"], ["max_num_waiting_reqs_after_preemption=-1", "at least 0"]),
        ([f"{S}.max_concurrent_seqs_per_instance=0"], ["max_concurrent_seqs_per_instance=0", "at least 1"]),
        ([f"{S}.request_budget=-1"], ["request_budget=-1", "at least 0"]),
        ([f"{S}.delta_throughput_threshold=1.5"], ["delta_throughput_threshold=1.5", "from 0 to 1"]),
        ([f"{S}.method=throughput_optimal"], ["method=throughput_optimal", "cost_model_path", "qwen_7b"]),
        ([f"{S}.method=throughput_optimal_with_budget"], ["throughput_optimal_with_budget", "cost_model_path"]),
        ([f"{S}.method=cache_aware", NO_STATUS], ["method=cache_aware", "psrl.status_collection.enable=False"]),
        ([f"{POLICY}.cache_threshold=-0.1"], ["cache_threshold=-0.1", "from 0 to 1"]),
        ([f"{POLICY}.balance_token_usage_threshold=1.1"], ["balance_token_usage_threshold=1.1", "from 0 to 1"]),
        ([f"{POLICY}.overload_token_usage_threshold=2"], ["overload_token_usage_threshold=2", "from 0 to 1"]),
        ([f"{POLICY}.overload_token_usage_threshold=0.5"], ["balance_token_usage_threshold=0.75", "overload_token_usage_threshold=0.5"]),
        ([f"{POLICY}.balance_abs_threshold=-1"], ["balance_abs_threshold=-1", "at least 0"]),
        ([f"{POLICY}.balance_rel_threshold=0.5"], ["balance_rel_threshold=0.5", "at least 1"]),
        ([f"{POLICY}.gpu_overlap_weight=-1"], ["gpu_overlap_weight=-1", "at least 0"]),
        ([f"{POLICY}.lmcache_overlap_weight=0.5"], ["lmcache_overlap_weight=0.5", "offload tier", "use 0"]),
        ([f"{POLICY}.eviction_interval_secs=-1"], ["eviction_interval_secs=-1", "at least 0"]),
        ([f"{POLICY}.max_tree_size=0"], ["max_tree_size=0", "at least 1"]),
        ([f"{POLICY}.block_size=0"], ["block_size=0", "at least 1"]),
        ([f"{POLICY}.kv_capacity_threshold=0.5"], ["kv_capacity_threshold=0.5", "at least 1"]),
        (["gen_actor_rollout_ref.rollout.max_num_seqs=4"], ["A group of 8 samples", "max_num_seqs=4"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([NO_STATUS], ["admission_reject_on_waiting=True", "no effect"]),
        ([f"{S}.method=throughput_optimal", f"{S}.cost_model_path=qwen_7b", NO_STATUS], ["only what was placed"]),
        ([f"{S}.cost_model_path=qwen_7b"], ["cost_model_path", "no effect", "request_num_balance"]),
        ([f"{POLICY}.block_size=32"], ["cache_aware_policy", "no effect"]),
    ],
)
def test_what_has_no_effect_is_said(overrides: list[str], words: list[str]) -> None:
    warnings = [w for w in check(composed(*overrides)) if all(word in w for word in words)]
    assert len(warnings) == 1


@pytest.mark.parametrize("method", ["random", "round_robin", "request_num_balance", "cache_aware", "cache_aware_v1"])
def test_each_method_can_be_asked_for(method: str) -> None:
    config = composed(f"{S}.method={method}")
    assert not [w for w in check(config) if "routing_strategy" in w]
    make_router(config)


def test_the_cost_model_must_be_there_and_know_the_parallelism() -> None:
    by_model = f"{S}.method=throughput_optimal_with_budget"
    good = composed(by_model, f"{S}.cost_model_path=qwen_7b")
    check(good)
    check_cost_model(good)
    router = make_router(good)
    assert isinstance(router, ThroughputOptimalWithBudget) and router.model.other_threshold == 0.0064
    with pytest.raises(ConfigError, match="qwen_8b"):
        check_cost_model(composed(by_model, f"{S}.cost_model_path=qwen_8b"))
    four = composed(by_model, f"{S}.cost_model_path=qwen_7b", "psrl.deployment.rollout_ngpus_per_node_per_instance=4")
    with pytest.raises(ConfigError, match="TP4_PP1"):
        check_cost_model(four)
    check_cost_model(composed(f"{S}.cost_model_path=nowhere"))  # nobody reads it
