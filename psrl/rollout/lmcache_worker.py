"""What runs within a worker of vLLM beside LMCache. Called through psrl's worker extension; imports LMCache where it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from psrl.rollout.lmcache_exchange import PrefixExchange
from psrl.rollout.lmcache_messages import PullOrder
from psrl.rundir.layout import RunDir

WAKE_S = 0.005
NOT_WHOLE = ("use_layerwise", "save_unfull_chunk", "enable_blending")
"""LMCache's settings with which it takes the engine's cache apart."""


def attend_offload_tier(pipeline_stages: int = 1) -> None:
    """Call once in each worker when its KV cache is there. RuntimeError if LMCache did not start: vLLM goes on without it
    and only its log says so, but the tier was asked for by name. ValueError for settings and caches whose blocks cannot be
    copied whole, and for a model whose `pipeline_stages` LMCache would leave out."""
    engine = _tier()
    if named := [name for name in NOT_WHOLE if getattr(engine.config, name)]:
        raise ValueError(
            f"whole blocks are copied to and from LMCache: take {', '.join(named)} out of psrl.lmcache.config_file or the environment"
        )
    if engine.config.remote_url and engine.config.remote_serde not in (None, "naive"):
        raise ValueError(
            f"remote_serde={engine.config.remote_serde} squeezes keys and values, whose places in a block it does not know: use naive in psrl.lmcache.config_file"
        )
    if engine.save_only_first_rank and pipeline_stages > 1:
        raise ValueError(
            "psrl.lmcache.enable=True is refused for a model with latent attention on pipeline stages: LMCache keeps what the first worker has, "
            "and no other stage would load anything; use pipeline_model_parallel_size=1"
        )
    engine.gpu_connector.attach()
    answer_in_time(engine)


def empty_offload_tier() -> int:
    """Drop every entry in host memory (`psrl.lmcache.clear_on_weight_update`); how many. RuntimeError without a tier.

    LMCache's own `clear` passes over what is pinned, and a sample that was taken away between its lookup and its load leaves pins."""
    manager = _tier().storage_manager
    if manager is None:  # a model with latent attention: only the first rank has a tier
        return 0
    backend = manager.local_cpu_backend
    with backend.cpu_lock:
        entries = list(backend.hot_cache)
    return int(backend.batched_remove(entries))


def share_prefixes(settings: dict[str, Any]) -> PrefixExchange:
    """Give this worker's entries to other instances that ask, and fetch theirs (kv_transfer sync and pin_sync)."""
    return PrefixExchange(_tier(), **settings | {"run_dir": RunDir(Path(settings["run_dir"]))})


def pull_prefixes(exchange: PrefixExchange, orders: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Begin these PullOrders; the PullEnds since the last call. In plain values, as a worker is called with."""
    return [msgspec.to_builtins(end) for end in exchange.exchange(msgspec.convert(orders, list[PullOrder]))]


def answer_in_time(engine: Any) -> None:
    """Wake the event loop of LMCache's storage every WAKE_S when it shares entries.

    LMCache 0.5 talks to its controller from two event loops over one socket. The loop that registered with the controller
    takes half of the answers and hands them to the other without waking it, so they lie there until something else
    happens: without this every second question to a peer ran into its deadline.
    """
    if engine.config.enable_p2p:
        asyncio.run_coroutine_threadsafe(_wake_often(), engine.storage_manager.loop)


async def _wake_often() -> None:
    while True:
        await asyncio.sleep(WAKE_S)


def _tier() -> Any:
    from lmcache.integration.vllm.utils import ENGINE_NAME
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    engine = LMCacheEngineBuilder.get(ENGINE_NAME)
    if engine is None or not engine.is_healthy():
        raise RuntimeError("psrl.lmcache.enable=True but LMCache did not start in this worker: its log says why")
    return engine
