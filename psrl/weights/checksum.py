"""One number for the content of a section of a payload, taken on the device where it lies, at memory speed.

It guards against torn, stale and misplaced bytes, not against malice. A check may not cost more than the copy that it
guards, hence one pass of plain sums: no number of words ever leaves the device.
"""

from __future__ import annotations

import torch

_BLOCK_WORDS = 8192
_MASK = (1 << 64) - 1
_FOLD = 0x9E3779B97F4A7C15  # odd, so folding loses nothing


def checksum(data: torch.Tensor) -> int:
    """64-bit checksum of a contiguous uint8 tensor that starts at a multiple of 8 bytes; waits for the device.

    Blocks of 64 KiB that change places change it; 8-byte words that do so inside a block do not.
    """
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    blocked = words.numel() // _BLOCK_WORDS * _BLOCK_WORDS
    # Sums wrap around, as integers do. Odd weights: each is invertible modulo 2^64, so no change of one block can vanish.
    sums = words[:blocked].view(-1, _BLOCK_WORDS).sum(1)
    weights = torch.arange(1, 2 * sums.numel() + 2, 2, device=data.device)
    blocks, rest = (sums * weights[:-1]).sum(), (words[blocked:] * weights[-1]).sum()
    tail = int.from_bytes(bytes(data[whole:].tolist()), "little")
    return (int(blocks + rest) + (tail + data.numel()) * _FOLD) & _MASK


def fold(checksums: tuple[int, ...]) -> int:
    """One 64-bit number for several, in order."""
    total = 0
    for one in checksums:
        total = ((total ^ one) * _FOLD) & _MASK
    return total
