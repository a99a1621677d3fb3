"""Which blocks of keys and values outlive their sequence, and where. Pure bookkeeping: no tensors, no clock.

A block holds `block_size` tokens and is named by all tokens up to its end (psrl.protocol.blocks), so that one name tells that a
whole beginning is the same. Nobody refers to a cached block: whoever hits one copies it into a row of its own. So each may go
at any time, and the least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from psrl.rollout.held_blocks import HeldBlocks


class BlockRun(NamedTuple):
    """Blocks that follow one another in a row, and the slots that they are copied to or from."""

    row: int
    first: int
    """Number of the first block: it begins at token `first * block_size`."""
    slots: list[int]


class PrefixCache:
    """Names of blocks and the slots that hold them. A block without the ones before it can never be hit, so those outlive it.

    >>> cache = PrefixCache(block_size=16)
    >>> cache.keep([10, 11, 12], room=3)  # (number of the first block to copy, slots)
    (0, [0, 1, 2])
    >>> cache.hit([10, 11, 99])
    [0, 1]
    >>> cache.keep([10, 20], room=3)  # the last block of the other chain yields its slot
    (1, [2])
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.held = HeldBlocks()
        """For whoever is told about it."""
        self._slots: OrderedDict[int, int] = OrderedDict()
        """Slot of each name, least recently used first. Whole beginnings are used, the last block of them first: each block
        stands before the one that it follows, and the first of all is one that none follows."""
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def cached(self, names: Sequence[int]) -> int:
        """How many of a sequence's blocks are here, from its first one on."""
        return sum(1 for _ in takewhile(self._slots.__contains__, names))

    def hit(self, names: Sequence[int]) -> list[int]:
        """Slots of these blocks, from the first to the last that is here; they count as used. Valid until the next `keep`."""
        return self._use(names[: self.cached(names)])

    def keep(self, names: Sequence[int], room: int) -> tuple[int, list[int]]:
        """A sequence with these blocks leaves: its first `room` blocks stay, and others make way for them. Returns how many of
        them were here, and the slots that the others are to be copied to."""
        names = names[: max(0, room)]
        known = self.cached(names)
        self._use(names[:known])
        self.shrink(room - (len(names) - known))
        for name in names[known:]:
            self._slots[name] = self._free.pop() if self._free else len(self._slots)
        self.held.store(names[known:])
        return known, self._use(names)[known:]

    def shrink(self, room: int) -> None:
        """Evict until at most `room` blocks are left."""
        while len(self._slots) > max(0, room):
            name, slot = self._slots.popitem(last=False)
            self._free.append(slot)
            self.held.remove((name,))

    def clear(self) -> None:
        self._slots.clear()
        self._free.clear()
        self.held.clear()

    def _use(self, names: Sequence[int]) -> list[int]:
        for name in reversed(names):
            self._slots.move_to_end(name)
        return [self._slots[name] for name in names]
