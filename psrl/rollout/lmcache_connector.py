"""LMCache within vLLM's workers, as vLLM is told to load it (`kv_connector_module_path`): LMCache's own connector, with copies that
know vLLM's cache, and without a step that leaves loads out.

LMCache 0.5 copies token by token with kernels made for caches with keys and values apart. vLLM 0.26 keeps them in one dimension, and
what was loaded was silently wrong (found in a run: rollout_corr/kl 0.11 instead of 0.0002). And LMCache takes a step without attention
metadata for one without requests, but vLLM runs steps as whole CUDA graphs without any: what the scheduler had counted as loaded was
not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from psrl.rollout.lmcache_blocks import BlockBytes
from psrl.rollout.lmcache_tier import chunk_memory


class BlockCopies:
    """What LMCache moves chunks between the tier and the engine's cache with: as much of its GPUConnectorInterface as it calls where
    it copies all layers at once. Everything is done when a call returns."""

    def __init__(self, *, token_bytes: int, chunk_tokens: int) -> None:
        self._token_bytes, self._chunk_tokens = token_bytes, chunk_tokens
        self._blocks: BlockBytes | None = None
        self._cache: tuple[Sequence[torch.Tensor], int, int] | None = None

    def register(self, layers: Sequence[torch.Tensor], *, blocks: int, block_tokens: int) -> None:
        """The engine's cache, as soon as it is there: so many blocks, of which the kernels may know each as several."""
        self._cache = layers, blocks, block_tokens

    def attach(self) -> None:
        """Before anything is copied. ValueError as `BlockBytes`, or if a layer is not a row of blocks."""
        assert self._cache is not None
        layers, blocks, block_tokens = self._cache
        if layers[0].shape[0] % blocks:
            raise ValueError(
                f"the engine's cache is not {blocks} blocks in a row but {tuple(layers[0].shape)}: use psrl.lmcache.enable=False "
                "with this attention backend"
            )
        self._blocks = BlockBytes(
            layers,
            block_tokens=block_tokens * blocks // layers[0].shape[0],
            token_bytes=self._token_bytes,
            chunk_tokens=self._chunk_tokens,
        )

    @property
    def layout(self) -> str:
        """What a chunk's bytes are."""
        assert self._blocks is not None
        return self._blocks.layout

    def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        assert self._blocks is not None
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self._blocks.save(kwargs["slot_mapping"][start:end], chunk_memory(chunk))
        self._blocks.wait()

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: list[int] | None = None, ends: list[int] | None = None, **kwargs: Any
    ) -> None:
        assert self._blocks is not None and starts is not None and ends is not None
        there = kwargs.get("vllm_cached_tokens", 0)  # in the engine's cache, perhaps in blocks that other requests read
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            skip = min(end - start, max(0, there - start))
            self._blocks.load(chunk_memory(chunk), kwargs["slot_mapping"][start:end], skip=skip)
        self._blocks.wait()


class LMCacheBlockConnector(LMCacheConnectorV1):  # type: ignore[misc]  # vLLM has no types here
    """vLLM makes one in its scheduler and one in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._copies: BlockCopies | None = None
        with self._own_copies():
            super().__init__(vllm_config, role, kv_cache_config)
        self._size = {"blocks": kv_cache_config.num_blocks, "block_tokens": vllm_config.cache_config.block_size}

    @contextmanager
    def _own_copies(self) -> Iterator[None]:
        """LMCache makes its copier within, for the devices that it knows."""
        import lmcache.v1.gpu_connector as lmcache_connectors  # not sooner: vLLM looks at this class before it starts workers

        def make(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> BlockCopies:
            layers, planes, _, heads, size = metadata.kv_shape
            token_bytes = planes * layers * heads * size * metadata.kv_dtype.itemsize
            self._copies = BlockCopies(token_bytes=token_bytes, chunk_tokens=metadata.chunk_size)
            return self._copies

        before = lmcache_connectors.CreateGPUConnector
        lmcache_connectors.CreateGPUConnector = make
        try:
            yield
        finally:
            lmcache_connectors.CreateGPUConnector = before

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._copies is not None:
            self._copies.register(list(kv_caches.values()), **self._size)
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if forward_context.attn_metadata is None:
            forward_context = SimpleNamespace(attn_metadata={})
        super().start_load_kv(forward_context, **kwargs)
