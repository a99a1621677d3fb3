"""An engine's cache as blocks of bytes, copied whole between it and chunks of host memory.

What lies where within a block is the attention kernels' affair and changes with them (vLLM 0.26 packs keys and values into one
dimension, its CPU build orders them once more); whole blocks are the same bytes whatever that is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BlockBytes:
    """`layers`: the cache of each layer, the number of a block first, all of the same number of `block_tokens` tokens. The bytes
    of a chunk of `chunk_tokens` are the blocks of its tokens, layer by layer. ValueError if chunks are not whole blocks, a block
    is not one piece of memory in each layer, or the layers have not `token_bytes` bytes for a token between them."""

    def __init__(
        self, layers: Sequence[torch.Tensor], *, block_tokens: int, token_bytes: int, chunk_tokens: int
    ) -> None:
        if chunk_tokens % block_tokens:
            raise ValueError(
                f"a chunk of {chunk_tokens} tokens is not whole blocks of the engine's {block_tokens}: psrl.lmcache.chunk_size must "
                f"be a multiple of {block_tokens}"
            )
        self._rows = [_rows(layer) for layer in layers]
        held = sum(rows.shape[1] * rows.itemsize for rows in self._rows)
        if held != token_bytes * block_tokens or len({rows.shape for rows in self._rows}) != 1:
            raise ValueError(
                f"{len(layers)} layers with blocks of {sorted({tuple(layer.shape[1:]) for layer in layers})} {layers[0].dtype} hold "
                f"{held} bytes for {block_tokens} tokens, not {token_bytes} for each: use psrl.lmcache.enable=False with this model"
            )
        self._block_tokens = block_tokens
        shape, strides = tuple(layers[0].shape[1:]), layers[0].stride()[1:]
        self.layout = f"blocks of {block_tokens} tokens, {shape} with strides {strides} of {layers[0].dtype}"
        """What a block is; blocks of caches that say the same can be exchanged."""
        self._staging = self._rows[0].new_empty(len(layers), chunk_tokens // block_tokens, self._rows[0].shape[1])
        """A chunk beside the cache, in one piece: copies to and from the host are large."""

    def save(self, slots: torch.Tensor, chunk: torch.Tensor) -> None:
        """Copy the blocks of a chunk's tokens into `chunk`, bytes in host memory. `slots`: each token's place (block times tokens of
        a block, plus the place in it), on the cache's device. On a GPU this keeps to the order of the current stream, and is
        done once `wait` returns."""
        blocks = self._blocks(slots)
        for rows, layer in zip(self._rows, self._staging, strict=True):
            torch.index_select(rows, 0, blocks, out=layer)
        chunk.view(self._staging.dtype).copy_(self._staging.view(-1), non_blocking=True)

    def load(self, chunk: torch.Tensor, slots: torch.Tensor, *, skip: int = 0) -> None:
        """Copy `chunk` to where `slots` says, but for the whole blocks of its first `skip` tokens. In the order of `save`."""
        blocks = self._blocks(slots)
        self._staging.view(-1).copy_(chunk.view(self._staging.dtype), non_blocking=True)
        left_out = skip // self._block_tokens
        for rows, layer in zip(self._rows, self._staging, strict=True):
            rows.index_copy_(0, blocks[left_out:], layer[left_out:])

    def wait(self) -> None:
        """Until all that was begun in the current stream is done."""
        if self._staging.is_cuda:
            torch.cuda.current_stream(self._staging.device).synchronize()

    def _blocks(self, slots: torch.Tensor) -> torch.Tensor:
        if len(slots) != self._staging.shape[1] * self._block_tokens:
            raise ValueError(f"{len(slots)} tokens are not a chunk")
        return slots[:: self._block_tokens] // self._block_tokens


def _rows(layer: torch.Tensor) -> torch.Tensor:
    """A block a row, in the widest integers that fit: the same memory as `layer` (blocks, ...)."""
    strides = layer.stride()
    inner = sorted(range(1, layer.ndim), key=lambda axis: strides[axis], reverse=True)
    ordered = layer.permute(0, *inner)
    if not ordered[0].is_contiguous():
        raise ValueError(
            f"a block of {tuple(layer.shape)} with strides {strides} is not one piece of memory: use psrl.lmcache.enable=False"
        )
    rows = ordered.as_strided((layer.shape[0], ordered[0].numel()), (strides[0], 1)).view(torch.uint8)
    fits = all(n % 8 == 0 for n in (rows.shape[1], rows.stride(0), rows.storage_offset(), rows.data_ptr()))
    return rows.view(torch.int64) if fits else rows
