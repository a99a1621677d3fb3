"""Blocks of an engine's cache come back from a chunk of bytes as they were, wherever the kernels want things within a block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from psrl.rollout.lmcache_blocks import BlockBytes

BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 9, 2, 4, 6, 3
CHUNK = 3 * TOKENS
TOKEN_BYTES = LAYERS * HEADS * SIZE * 4


def heads_first() -> torch.Tensor:
    return torch.randn(BLOCKS, HEADS, TOKENS, SIZE)


def tokens_first() -> torch.Tensor:
    return torch.randn(BLOCKS, TOKENS, HEADS, SIZE).permute(0, 2, 1, 3)


def padded() -> torch.Tensor:
    pages = torch.randn(BLOCKS, HEADS * TOKENS * SIZE + 10)
    return pages.as_strided((BLOCKS, HEADS, TOKENS, SIZE), (pages.shape[1], TOKENS * SIZE, SIZE, 1))


def latent() -> torch.Tensor:
    return torch.randn(BLOCKS, TOKENS, HEADS * SIZE)


def odd() -> torch.Tensor:
    """Blocks that begin at no multiple of eight bytes."""
    return torch.randn(BLOCKS * HEADS * TOKENS * SIZE + 1)[1:].view(BLOCKS, HEADS, TOKENS, SIZE)


LAYOUTS = [heads_first, tokens_first, padded, latent, odd]


def slots(blocks: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(block * TOKENS, (block + 1) * TOKENS) for block in blocks])


def block_bytes(layers: list[torch.Tensor]) -> BlockBytes:
    return BlockBytes(layers, block_tokens=TOKENS, token_bytes=TOKEN_BYTES, chunk_tokens=CHUNK)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_to_other_places_of_another_cache(layout: Callable[[], torch.Tensor]) -> None:
    source, target = [layout() for _ in range(LAYERS)], [layout() for _ in range(LAYERS)]
    untouched = [layer.clone() for layer in target]
    chunk = torch.zeros(CHUNK * TOKEN_BYTES, dtype=torch.uint8)
    block_bytes(source).save(slots([7, 0, 4]), chunk)
    block_bytes(target).load(chunk, slots([1, 8, 2]))
    for before, after, kept in zip(source, target, untouched, strict=True):
        assert torch.equal(after[[1, 8, 2]], before[[7, 0, 4]])
        others = [0, 3, 4, 5, 6, 7]
        assert torch.equal(after[others], kept[others])


@pytest.mark.parametrize(
    ("skip", "left"), [(0, []), (TOKENS - 1, []), (TOKENS, [5]), (2 * TOKENS, [5, 6]), (CHUNK, [5, 6, 3])]
)
def test_what_the_engine_has_stays(skip: int, left: list[int]) -> None:
    cache = [heads_first() for _ in range(LAYERS)]
    before = [layer.clone() for layer in cache]
    chunk = torch.zeros(CHUNK * TOKEN_BYTES, dtype=torch.uint8)
    block_bytes(cache).load(chunk, slots([5, 6, 3]), skip=skip)
    for layer, old in zip(cache, before, strict=True):
        for block in (5, 6, 3):
            assert torch.equal(layer[block], old[block] if block in left else torch.zeros_like(old[block]))


def test_what_cannot_be_copied_is_refused() -> None:
    layers = [heads_first() for _ in range(LAYERS)]
    with pytest.raises(ValueError, match=r"psrl\.lmcache\.chunk_size must be a multiple of 4$"):
        BlockBytes(layers, block_tokens=TOKENS, token_bytes=TOKEN_BYTES, chunk_tokens=CHUNK + 1)
    with pytest.raises(
        ValueError, match=rf"hold {TOKEN_BYTES * TOKENS} bytes for 4 tokens, not {2 * TOKEN_BYTES} for each"
    ):
        BlockBytes(layers, block_tokens=TOKENS, token_bytes=2 * TOKEN_BYTES, chunk_tokens=CHUNK)
    apart = [torch.randn(2, BLOCKS, TOKENS * HEADS * SIZE).transpose(0, 1) for _ in range(LAYERS)]
    with pytest.raises(ValueError, match="is not one piece of memory"):
        BlockBytes(apart, block_tokens=TOKENS, token_bytes=TOKEN_BYTES, chunk_tokens=CHUNK)
    with pytest.raises(ValueError, match="8 tokens are not a chunk"):
        block_bytes(layers).save(slots([1, 2]), torch.zeros(1))
