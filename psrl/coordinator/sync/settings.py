"""What the coordinator reads of `psrl.rollout_coordination.sync_and_mig_strategy`, sync part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    method: str = "greedy"
    """greedy | status_based"""
    indicator: str = "request_num"
    """Of status_based: request_num | throughput | kv_cache | hypothesis_test."""
    threshold: float = 0.0
    check_req_before_sync: bool = True
    seamless_train_version: int = 0
    check_interval_s: float = 0.1
    """Most time between two looks at the whole fleet."""
