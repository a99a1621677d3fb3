"""Keys and values of blocks that no running sequence owns: the tensors behind `PrefixCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from psrl.rollout.engines.prefix_cache import BlockCopy


class Rows(Protocol):
    """One layer's rows, [rows, kv_heads, length, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


class BlockStore:
    """Per layer one tensor [slots, block_size, kv_heads, head_dim] for keys and one for values, grown when needed.

    The layout is that of an indexed read of rows, so that any number of blocks of any rows is one copy a tensor.
    """

    def __init__(self, *, num_layers: int, block_size: int, device: torch.device | str) -> None:
        self.block_size = block_size
        self._device = device
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers

    def take(self, layers: Sequence[Rows], copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of rows into slots."""
        rows, positions, slots = self._indices(copies)
        most = max(slot for _, _, slot in copies) + 1
        for i, layer in enumerate(layers):
            self._keys[i] = keys = self._grown(self._keys[i], layer.keys, most)
            self._values[i] = values = self._grown(self._values[i], layer.values, most)
            keys[slots] = layer.keys[rows, :, positions]
            values[slots] = layer.values[rows, :, positions]

    def give(self, layers: Sequence[Rows], copies: Sequence[BlockCopy]) -> None:
        """Copy slots, each of which was taken, into blocks of rows."""
        rows, positions, slots = self._indices(copies)
        for layer, keys, values in zip(layers, self._keys, self._values, strict=True):
            assert keys is not None and values is not None, "a slot that was never filled"
            layer.keys[rows, :, positions] = keys[slots]
            layer.values[rows, :, positions] = values[slots]

    def release(self) -> None:
        """Give all memory back."""
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)

    def _indices(self, copies: Sequence[BlockCopy]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [n, 1] and positions [n, block_size] of the blocks, and their slots [n]."""
        rows, numbers, slots = torch.tensor(copies, device=self._device).unbind(1)
        offsets = torch.arange(self.block_size, device=self._device)
        return rows.unsqueeze(1), numbers.unsqueeze(1) * self.block_size + offsets, slots

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor, slots: int) -> torch.Tensor:
        have = 0 if old is None else len(old)
        if old is not None and slots <= have:
            return old
        new = like.new_empty(max(slots, have + have // 2), self.block_size, like.shape[1], like.shape[3])
        if old is not None:
            new[:have] = old
        return new
