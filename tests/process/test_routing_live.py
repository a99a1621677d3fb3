"""Routing in whole runs: real processes, the embedded engine, long-tailed lengths."""

from __future__ import annotations

import pytest
from runs import NewRun

pytestmark = pytest.mark.process

ROUTING = "psrl.rollout_coordination.routing_strategy"
LONG_TAIL: dict[str, object] = {
    "data.task": "longtail_count",
    "data.max_response_length": 128,
    "psrl.staleness": 1,
    "psrl.rollout_n": 4,
    "trainer.total_training_steps": 4,
}
WAYS: dict[str, dict[str, object]] = {
    "throughput_optimal_with_budget": {
        f"{ROUTING}.method": "throughput_optimal_with_budget",
        f"{ROUTING}.cost_model_path": "qwen_7b",
        f"{ROUTING}.delta_throughput_threshold": 0.9,
        f"{ROUTING}.request_sort_indicator": "long_length",
        f"{ROUTING}.enable_multi_priority_queue": True,
    },
    "cache_aware_v1": {
        f"{ROUTING}.method": "cache_aware_v1",
        f"{ROUTING}.enable_trajectory_sticky": True,
        f"{ROUTING}.candidate_sort_indicator": "reserve_capability",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_under_each_of_the_weighing_methods_is_complete_and_clean(way: str, new_run: NewRun) -> None:
    run = new_run(LONG_TAIL | WAYS[way])
    run.start()
    assert run.wait() == 0, run.log("coordinator")
    assert run.audit().status == "completed" and run.version == 4


def test_an_engine_that_preempts_hands_its_queue_back_and_cache_aware_places_it_anew(new_run: NewRun) -> None:
    """The KV cache holds two full sequences: eight samples start together and soon do not fit."""
    few_tokens = {
        f"{ROUTING}.method": "cache_aware",
        f"{ROUTING}.enable_group_sticky": True,
        "gen_actor_rollout_ref.rollout.ignore_eos": True,
        "gen_actor_rollout_ref.rollout.kv_cache_tokens": 512,
        f"{ROUTING}.max_num_waiting_reqs_after_preemption": 0,
        "trainer.total_training_steps": 2,
    }
    run = new_run(LONG_TAIL | few_tokens)
    run.start()
    assert run.wait() == 0, run.log("coordinator")
    assert run.outcome.counters["preempted_samples"] >= 1, run.outcome.counters
    assert run.audit().status == "completed" and run.version == 2
