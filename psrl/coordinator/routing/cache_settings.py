"""Settings of the cache-aware methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Shares and KV usage are in [0, 1]; sizes in tokens."""

    cache_threshold: float = 0.0
    """Least share of a request that must be cached at an instance before its cache counts."""
    gpu_weight: float = 1.0
    """cache_aware_v1: worth of a token in the engine's cache, in tokens that need not be computed."""
    offload_weight: float = 0.0
    """cache_aware_v1: the same for a token that is only in the offload tier."""
    balance_abs: int = 16
    balance_rel: float = 1.5
    """The load is uneven when the busiest has `balance_abs` samples more and `balance_rel` times as many as the least busy."""
    full_usage: float = 0.75
    """KV usage above which an instance is passed over for one that has less."""
    overload_usage: float = 1.0
    """KV usage from which an instance takes nothing while another one may."""
    tidy_interval_s: float = 60.0
    """Longest time between two trims of what is remembered."""
    max_tokens: int = 67108864
    """Most tokens remembered of one instance."""
    block_size: int = 16
    max_capacities: float = 2.0
    """Most tokens remembered of one instance, in KV capacities of it."""
