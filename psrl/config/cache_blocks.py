"""Whether routing goes by what is cached, and in which blocks."""

from __future__ import annotations

from psrl.config.schema import Config


def cache_block_size(config: Config) -> int:
    """Tokens of a cache block that routing compares prefixes by; 0: its method asks for none, so nobody names any."""
    strategy = config.psrl.rollout_coordination.routing_strategy
    return strategy.cache_aware_policy.block_size if strategy.method.startswith("cache_aware") else 0
