"""The publisher's side: shards in, one flat payload out. The cast to the engine's dtype happens here, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from psrl.protocol.weights import ShardEntry, ShardLayout
from psrl.trainer.backends.base import WeightShard
from psrl.weights.checksum import checksum
from psrl.weights.plan import aligned


def lay_out(shards: Iterable[WeightShard], rank: int, num_ranks: int, dtype: torch.dtype | None) -> ShardLayout:
    """Layout of these shards, back to back at aligned offsets. Floating-point tensors are published as `dtype` (None:
    as they are), others as they are. ValueError if a name comes twice."""
    entries: list[ShardEntry] = []
    end = 0
    for shard in shards:
        target = dtype if dtype is not None and shard.local.dtype.is_floating_point else shard.local.dtype
        offset, nbytes = aligned(end), shard.local.numel() * target.itemsize
        rows = shard.local.shape[0] if shard.local.dim() else 1
        name = str(target).removeprefix("torch.")
        entries.append(ShardEntry(shard.name, tuple(shard.full_shape), name, shard.row_start, rows, offset, nbytes))
        end = offset + nbytes
    twice = [name for name, times in Counter(entry.name for entry in entries).items() if times > 1]
    if twice:
        raise ValueError(
            f"rank {rank} publishes {', '.join(twice[:5])} more than once; tied tensors are published once"
        )
    return ShardLayout(rank, num_ranks, end, tuple(entries))


def pack(shards: Sequence[WeightShard], layout: ShardLayout, payload: torch.Tensor) -> int:
    """Copy the shards into the uint8 `payload` as `layout` says; returns the checksum of what stands there.

    ValueError if the shards are not those of the layout: what a rank publishes may not change during a run."""
    if [shard.name for shard in shards] != [entry.name for entry in layout.entries]:
        raise ValueError(
            f"rank {layout.rank} publishes other tensors than at first; names and order are fixed for a run"
        )
    for shard, entry in zip(shards, layout.entries, strict=True):
        part = payload[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype))
        if part.numel() != shard.local.numel() or shard.row_start != entry.row_start:
            raise ValueError(f"{entry.name} of rank {layout.rank} has other rows than at first: {entry}")
        part.view(shard.local.shape).copy_(shard.local.detach(), non_blocking=True)  # a GPU casts before it sends
    for device in {shard.local.device for shard in shards if shard.local.is_cuda}:
        torch.cuda.synchronize(device)
    return checksum(payload.numpy(), ((entry.offset, entry.nbytes) for entry in layout.entries))
