"""The shipped defaults, key by key: what the requirement document and the specification say, written down by hand."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from psrl.config.compose import compose_config
from psrl.config.flat import flatten

pytestmark = pytest.mark.unit

COORDINATION = "psrl.rollout_coordination"
ROUTING = f"{COORDINATION}.routing_strategy"
SYNC = f"{COORDINATION}.sync_and_mig_strategy"

STALENESS = {
    "psrl.staleness": 0,
    "psrl.staleness_buffer_entries": 512,
    "psrl.rollout_n": 1,
}
OVERLAP = {
    "psrl.fine_grain_overlap.granularity": "none",
    "psrl.fine_grain_overlap.multiplier": 1,
    "psrl.fine_grain_overlap.overlap_scope": "recompute",
}
SAMPLES = {
    f"{COORDINATION}.partial_rollout.enable": True,
    f"{COORDINATION}.partial_rollout.interrupt_as_prompt": False,
    f"{COORDINATION}.redundant_rollout.enable": False,
    "psrl.group_post_process.name": "dynamic_sampling_filter",
}
ROUTES = {
    f"{ROUTING}.method": "request_num_balance",
    f"{ROUTING}.admission_reject_on_waiting": True,
    f"{ROUTING}.max_num_waiting_reqs_after_preemption": 1024,
    f"{ROUTING}.max_concurrent_seqs_per_instance": 1024,
    f"{ROUTING}.enable_group_sticky": False,
    f"{ROUTING}.enable_trajectory_sticky": False,
    f"{ROUTING}.check_interval_in_ms": 500,
    f"{ROUTING}.delta_throughput_threshold": 0.5,
    f"{ROUTING}.request_budget": 1024,
    f"{ROUTING}.kv_transfer.transfer_timeout_ms": 5000,
    f"{ROUTING}.cache_aware_policy.cache_threshold": 0.0,
    f"{ROUTING}.cache_aware_policy.gpu_overlap_weight": 1.0,
    f"{ROUTING}.cache_aware_policy.lmcache_overlap_weight": 0.0,
    f"{ROUTING}.cache_aware_policy.balance_abs_threshold": 16,
    f"{ROUTING}.cache_aware_policy.balance_rel_threshold": 1.5,
    f"{ROUTING}.cache_aware_policy.balance_token_usage_threshold": 0.75,
    f"{ROUTING}.cache_aware_policy.overload_token_usage_threshold": 1.0,
    f"{ROUTING}.cache_aware_policy.eviction_interval_secs": 60.0,
    f"{ROUTING}.cache_aware_policy.max_tree_size": 67108864,
    f"{ROUTING}.cache_aware_policy.block_size": 16,
    f"{ROUTING}.cache_aware_policy.kv_capacity_threshold": 2.0,
}
WEIGHTS = {
    f"{SYNC}.method": "greedy",
    f"{SYNC}.check_interval_in_ms": 100,
    f"{SYNC}.sync.indicator": "request_num",
    f"{SYNC}.sync.check_req_before_sync": True,
    f"{SYNC}.sync.seamless_train_version": 0,
    f"{SYNC}.mig.enable": False,
    f"{SYNC}.mig.indicator": "request_num",
    "psrl.ps_mode": "auto",  # nixl where it loads
}
SESSIONS = {
    f"{COORDINATION}.session_strategy.thunder_agent.enable": False,
    f"{COORDINATION}.session_strategy.thunder_agent.check_interval_in_ms": 1000,
    f"{COORDINATION}.session_strategy.thunder_agent.env_token_weight": 1.0,
    f"{COORDINATION}.session_strategy.thunder_agent.buffer_per_session": 100,
    f"{COORDINATION}.session_strategy.thunder_agent.continue_scope": "bucketed",
    f"{COORDINATION}.session_strategy.thunder_agent.continue_force_pin": False,
}
STATUS = {
    "psrl.status_collection.enable": True,
    "psrl.status_collection.engine_sync_interval_in_ms": 100,
    "psrl.status_collection.coordinator_sync_interval_in_ms": 100,
}
LMCACHE = {
    "psrl.lmcache.enable": False,
    "psrl.lmcache.offload_size_gb": 100.0,
    "psrl.lmcache.chunk_size": 256,
    "psrl.lmcache.multi_version_kv": True,
    "psrl.lmcache.clear_on_weight_update": False,
    "psrl.lmcache.save_decode_cache": True,
    "psrl.lmcache.enable_p2p": False,
    "psrl.lmcache.gpu_pin_block_budget": 0,
}
SHARED_GPUS = {
    "psrl.tms.range": None,
    "psrl.tms.enable_nixl": False,
}
ALGORITHM = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.bypass_mode": False,
    "train_actor_rollout_ref.actor.ppo_epochs": 1,
    "train_actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "trainer.keep_last": 2,
}
NOT_STATED = {
    # The documents list the values and leave the default open: what is off, or named first, or makes no choice.
    f"{ROUTING}.request_sort_indicator": "small_id",
    f"{ROUTING}.candidate_sort_indicator": "version",
    f"{ROUTING}.enable_multi_priority_queue": False,
    f"{ROUTING}.cost_model_path": None,
    f"{ROUTING}.kv_transfer.enable": False,
    f"{ROUTING}.kv_transfer.transfer_mode": "async",
    f"{COORDINATION}.redundant_rollout.alg_global_batch_size": None,
    f"{COORDINATION}.redundant_rollout.redundant_global_batch_size": None,
    f"{COORDINATION}.redundant_rollout.alg_rollout_n": None,
    f"{COORDINATION}.redundant_rollout.redundant_rollout_n": None,
    f"{COORDINATION}.proactive_filter_strategy.method": None,
    f"{COORDINATION}.proactive_filter_strategy.threshold": None,
    "psrl.group_post_process.enable": False,
    f"{SYNC}.sync.threshold": None,
    f"{SYNC}.mig.threshold": None,
    f"{SYNC}.mig.stop_indicator": "request_num",
    f"{SYNC}.mig.stop_threshold": None,
    "psrl.lmcache.backend": "cpu",
    "psrl.lmcache.cache_policy": "LRU",
    "psrl.lmcache.disk_path": None,
    "psrl.lmcache.max_disk_size_gb": None,
    "psrl.lmcache.reserve_local_cpu_size": 0.0,
    "psrl.lmcache.config_file": None,
    "psrl.lmcache.p2p_transfer_channel": "nixl",
    "psrl.lmcache.controller_host": None,
    "psrl.lmcache.controller_pull_port": 8300,
    "psrl.lmcache.controller_reply_port": 8400,
    "psrl.colocate": False,
    "psrl.tms.enable_cuda_graph": False,
    "psrl.broadcast_init": False,
    "algorithm.rollout_correction.preset": None,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.rollout_rs_threshold": None,
}
TABLES = {
    "staleness": STALENESS,
    "overlap": OVERLAP,
    "samples": SAMPLES,
    "routes": ROUTES,
    "weights": WEIGHTS,
    "sessions": SESSIONS,
    "status": STATUS,
    "lmcache": LMCACHE,
    "shared GPUs": SHARED_GPUS,
    "algorithm": ALGORITHM,
    "not stated": NOT_STATED,
}
WHOLE = (f"{COORDINATION}.", "psrl.fine_grain_overlap.", "psrl.status_collection.", "psrl.lmcache.", "psrl.tms.")
"""Groups of keys that the tables hold all of: a new key's default is written down here, too."""


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    return flatten(OmegaConf.to_container(compose_config(["preset=cluster"])))


@pytest.mark.parametrize("table", TABLES)
def test_shipped_defaults_are_the_documented_ones(shipped: dict[str, Any], table: str) -> None:
    documented = TABLES[table]
    found = {key: shipped[key] for key in documented}
    assert found == documented
    assert list(map(type, found.values())) == list(
        map(type, documented.values())
    )  # True == 1 and 1 == 1.0 are not enough


def test_no_default_of_these_groups_is_left_out(shipped: dict[str, Any]) -> None:
    written = {key for table in TABLES.values() for key in table}
    assert len(written) == sum(map(len, TABLES.values()))
    assert {key for key in shipped if key.startswith(WHOLE)} <= written


def test_the_laptop_is_one_version_behind_with_small_buffers() -> None:
    laptop = flatten(OmegaConf.to_container(compose_config(["preset=laptop", "task=chain_sum"])))
    assert laptop["psrl.staleness"] == 1 and laptop["psrl.staleness_buffer_entries"] < 512
