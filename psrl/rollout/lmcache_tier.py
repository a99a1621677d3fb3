"""The offload tier of one worker as a transfer sees it: chunks by name, their memory, room for more.

All that psrl's transfers touch of LMCache's insides stands here, as of 0.5.6. A chunk is kept in place by a reference and a
pin: LMCache evicts neither what is in use nor what is pinned. Every call is safe beside LMCache's own threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

LARGEST_SHARE = 0.5
"""Of the tier, what transfers may keep in place or fill at a time: the rest stays free for what the engine itself needs."""


class Tier:
    """`engine`: LMCache's engine in this worker. ValueError if this worker has none."""

    def __init__(self, engine: Any) -> None:
        if engine.storage_manager is None:
            raise ValueError(
                "kv_transfer.transfer_mode sync and pin_sync need a tier in each worker, and LMCache keeps that of a model with latent "
                "attention in the first one only: use async"
            )
        self._engine, self._names = engine, engine.token_database
        self._cpu = engine.storage_manager.local_cpu_backend
        metadata = engine.metadata
        self.rank: int = metadata.worker_id
        self.chunk_size: int = engine.config.chunk_size
        self._shapes, self._dtypes = metadata.get_shapes(self.chunk_size), metadata.get_dtypes()
        nbytes = sum(math.prod(s) * d.itemsize for s, d in zip(self._shapes, self._dtypes, strict=True))
        step = self._cpu.memory_allocator.align_bytes
        self.largest_pull = int(LARGEST_SHARE * (self.memory.nbytes // (-(-nbytes // step) * step)))
        """Chunks that transfers may keep or fill at a time."""
        self.layout = (
            f"{self.chunk_size} tokens of {[tuple(s) for s in self._shapes]} {self._dtypes}, "
            f"rank {self.rank} of {metadata.world_size}, {engine.gpu_connector.layout}"
        )
        """What a chunk here is; chunks of workers that say the same can be exchanged."""

    @property
    def memory(self) -> torch.Tensor:
        """Where all chunks lie: one contiguous tensor of bytes."""
        return self._cpu.memory_allocator.buffer

    def hashes(self, token_ids: Sequence[int]) -> list[int]:
        """A number for each whole chunk that stands for all tokens up to its end; the same in every process of a run."""
        return [name for _, _, name in self._names.process_tokens(tokens=list(token_ids), make_key=False)]

    def keys(self, hashes: Sequence[int], tags: Mapping[str, str]) -> list[Any]:
        """LMCache's names of these chunks under `tags`."""
        sizes = [self.chunk_size] * len(hashes)
        named = self._names.process_tokens(hashes=list(hashes), offsets=sizes, request_configs=dict(tags))
        return [key for _, _, key in named]

    def count(self, keys: Iterable[Any]) -> int:
        """How many are here, from the first on without a gap."""
        found = 0
        for key in keys:
            if not self._cpu.contains(key):
                break
            found += 1
        return found

    def keep(self, keys: Iterable[Any]) -> list[Any]:
        """Keep the chunks of `count` where they are, until each has been given to `let_go`."""
        kept = []
        for key in keys:
            if (chunk := self._cpu.get_blocking(key)) is None:
                break
            chunk.pin()
            kept.append(chunk)
        return kept

    def let_go(self, chunks: Iterable[Any]) -> None:
        for chunk in chunks:
            if chunk.is_pinned:  # LMCache itself unpins what was pinned for minutes
                chunk.unpin()
            chunk.ref_count_down()

    def room(self, count: int) -> list[Any]:
        """Memory for `count` chunks, less if that would have to wait for others; what gives way is LMCache's choice."""
        made = []
        for _ in range(count):
            chunk = self._cpu.allocate(self._shapes, self._dtypes, self._engine.fmt, busy_loop=False)
            if chunk is None:
                break
            made.append(chunk)
        return made

    def put(self, keys: Sequence[Any], chunks: Sequence[Any]) -> None:
        """File chunks whose bytes have arrived."""
        self._cpu.batched_submit_put_task(keys, list(chunks))
        self.drop(chunks)  # filed ones have a reference of the tier's own

    def drop(self, chunks: Iterable[Any]) -> None:
        """Give memory of `room` back."""
        for chunk in chunks:
            chunk.ref_count_down()


def chunk_memory(chunk: Any) -> torch.Tensor:
    """The bytes of a chunk."""
    return chunk.raw_data[: chunk.get_size()]
