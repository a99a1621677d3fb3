"""The publisher's side: shards in, one flat payload out. The cast to the engine's dtype happens here, once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import prod

import msgspec
import torch

from psrl.protocol.weights import ShardEntry, ShardLayout
from psrl.trainer.backends.base import WeightShard
from psrl.weights.checksum import checksum
from psrl.weights.plan import aligned
from psrl.weights.split import Block, Split


def lay_out(
    shards: Iterable[WeightShard], rank: int, num_ranks: int, dtype: torch.dtype | None, split: Split | None = None
) -> ShardLayout:
    """Layout of these shards: a section for each engine rank of `split`, then one for what all need, each of them one section
    a layer if the engine has pipeline stages; the tensors of a section back to back at aligned offsets. Floating-point
    tensors are published as `dtype` (None: as they are), others as they are. ValueError if a name comes twice."""
    given, split = list(shards), split or Split()
    twice = [name for name, times in Counter(shard.name for shard in given).items() if times > 1]
    if twice:
        raise ValueError(
            f"rank {rank} publishes {', '.join(twice[:5])} more than once; tied tensors are published once"
        )
    parts: dict[tuple[int, str], list[ShardEntry]] = defaultdict(list)
    for shard in given:
        target = dtype if dtype is not None and shard.local.dtype.is_floating_point else shard.local.dtype
        blocks = split.blocks(shard.name, shard.full_shape)
        for section, block in enumerate(blocks, start=0 if len(blocks) == split.ways else split.ways):
            parts[section, split.unit(shard.name)].append(_entry(shard, block, target))
    entries: list[ShardEntry] = []
    sections, end = [], 0
    for _, part in sorted(parts.items(), key=lambda item: item[0][0]):
        begun = end = aligned(end)
        for entry in part:
            entries.append(msgspec.structs.replace(entry, offset=aligned(end)))
            end = aligned(end) + entry.nbytes
        sections.append((begun, end - begun))
    return ShardLayout(rank, num_ranks, end, tuple(entries), tuple(sections))


def pack(shards: Sequence[WeightShard], layout: ShardLayout, payload: torch.Tensor) -> tuple[int, ...]:
    """Copy the shards into the uint8 `payload`, on whatever device, as `layout` says; returns the checksums of the sections.

    ValueError if the shards are not those of the layout: what a rank publishes may not change during a run."""
    given = {shard.name: shard for shard in shards}
    names = list(dict.fromkeys(entry.name for entry in layout.entries))
    if len(given) != len(shards) or given.keys() != set(names):
        raise ValueError(
            f"rank {layout.rank} publishes other tensors than at first; names and order are fixed for a run"
        )
    targets, sources = [], []
    for entry in layout.entries:
        shard = given[entry.name]
        source, first = _rows(shard), entry.row_start - shard.row_start
        part = payload[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype))
        block = source[first : first + entry.rows]
        if entry.columns is not None:
            block = block[:, slice(*entry.columns)]
        if first < 0 or block.numel() != part.numel() or shard.full_shape != entry.full_shape:
            raise ValueError(f"{entry.name} of rank {layout.rank} has other rows than at first: {entry}")
        if entry.nbytes:
            targets.append(part.view(block.shape))
            sources.append(block)
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
        if payload.device.type == "cpu" and sources[0].is_cuda:
            torch.cuda.synchronize(sources[0].device)  # pinned memory is written later, the checksum reads it now
    return tuple(checksum(payload[offset : offset + nbytes]) for offset, nbytes in layout.sections)


def _rows(shard: WeightShard) -> torch.Tensor:
    """The local rows as [rows, ...], with at least one dimension."""
    local = shard.local.detach()
    return local if local.dim() else local.view(1)


def _entry(shard: WeightShard, block: Block, dtype: torch.dtype) -> ShardEntry:
    """What of the shard lies in the block, its place still open."""
    local = _rows(shard)
    start = min(max(shard.row_start, block.rows[0]), shard.row_start + local.shape[0])
    rows = max(0, min(shard.row_start + local.shape[0], block.rows[1]) - start)
    width = prod(shard.full_shape[1:])
    if block.columns is not None:
        width = width // shard.full_shape[1] * (block.columns[1] - block.columns[0])
    name = str(dtype).removeprefix("torch.")
    nbytes = rows * width * dtype.itemsize
    return ShardEntry(shard.name, tuple(shard.full_shape), name, start, rows, 0, nbytes, block.columns)
