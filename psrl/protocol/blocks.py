"""Names of cache blocks: whoever holds the same tokens gives them the same names, in any process and on any host."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

ROOT = 0
"""The name of what comes before the first block: nothing."""


def block_names(token_ids: Sequence[int] | np.ndarray, block_size: int, before: int = ROOT) -> list[int]:
    """A name for each whole block of `block_size` tokens that stands for all tokens up to its end: 63 bits, chained from
    `before`, the name of the block before the first of these. What fills no whole block has none.

    >>> one, two = block_names([5, 6, 7, 8, 9], 2)
    >>> block_names([7, 8], 2, before=one) == [two]
    True
    """
    ids = np.asarray(token_ids, dtype="<i4")
    names: list[int] = []
    for end in range(block_size, len(ids) + 1, block_size):
        before = block_name(before, ids[end - block_size : end].tobytes())
        names.append(before)
    return names


def block_name(before: int, token_bytes: bytes) -> int:
    """The name of one block after `before`; `token_bytes` are its ids as little-endian int32."""
    digest = blake2b(token_bytes, digest_size=8, key=before.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") >> 1
