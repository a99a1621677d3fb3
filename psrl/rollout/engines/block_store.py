"""Keys and values of blocks that no running sequence owns: the tensors behind `PrefixCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from psrl.rollout.engines.prefix_cache import BlockRun


class Rows(Protocol):
    """One layer's rows, [rows, kv_heads, length, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


class BlockStore:
    """Per layer one tensor [slots, kv_heads, block_size, head_dim] for keys and one for values, grown when needed.

    A run of blocks in a row is a view of this shape: one strided copy a tensor, half the price of an indexed one.
    """

    def __init__(self, *, num_layers: int, block_size: int, device: torch.device | str) -> None:
        self.block_size = block_size
        self._device = device
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers

    def take(self, layers: Sequence[Rows], runs: Sequence[BlockRun]) -> None:
        """Copy blocks of rows into slots."""
        runs = [run for run in runs if run.slots]
        most = max((max(run.slots) for run in runs), default=-1) + 1
        for run in runs:
            slots = torch.tensor(run.slots, device=self._device)
            for i, layer in enumerate(layers):
                self._keys[i] = keys = self._grown(self._keys[i], layer.keys, most)
                self._values[i] = values = self._grown(self._values[i], layer.values, most)
                keys.index_copy_(0, slots, self._blocks(layer.keys, run))
                values.index_copy_(0, slots, self._blocks(layer.values, run))

    def give(self, layers: Sequence[Rows], runs: Sequence[BlockRun]) -> None:
        """Copy slots, each of which was taken, into blocks of rows."""
        for run in runs:
            slots = torch.tensor(run.slots, device=self._device)
            for layer, keys, values in zip(layers, self._keys, self._values, strict=True):
                assert keys is not None and values is not None, "a slot that was never filled"
                self._blocks(layer.keys, run).copy_(keys[slots])
                self._blocks(layer.values, run).copy_(values[slots])

    def release(self) -> None:
        """Give all memory back."""
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)

    def _blocks(self, rows: torch.Tensor, run: BlockRun) -> torch.Tensor:
        """View [blocks, kv_heads, block_size, head_dim] of a run."""
        size, count = self.block_size, len(run.slots)
        tokens = rows[run.row, :, run.first * size : (run.first + count) * size]
        return tokens.unflatten(1, (count, size)).transpose(0, 1)

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor, slots: int) -> torch.Tensor:
        have = 0 if old is None else len(old)
        if old is not None and slots <= have:
            return old
        new = like.new_empty(max(slots, have + have // 2), like.shape[1], self.block_size, like.shape[3])
        if old is not None:
            new[:have] = old
        return new
