"""What instances have cached, as far as a router can know: the blocks that their engines report, or of what was sent to
them, the longest unused forgotten.

A block name stands for all tokens up to its end, so whoever holds block i of a request holds those before it, and the
holders of later blocks are a subset of the holders of earlier ones. No tree is needed to find the longest common prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class PrefixMemory:
    """Blocks by row (the caller's number of an instance). A block used later is forgotten later; within one request the
    end is forgotten before the beginning."""

    def __init__(self) -> None:
        self._holders: dict[int, set[int]] = {}
        self._held: dict[int, dict[int, None]] = {}
        """Of each row, the longest unused first."""

    def size(self, row: int) -> int:
        """Blocks remembered."""
        return len(self._held.get(row, ()))

    def rows(self) -> list[int]:
        return list(self._held)

    def remember(self, row: int, blocks: Sequence[int]) -> None:
        held = self._held.setdefault(row, {})
        for block in reversed(blocks):
            if block in held:
                del held[block]
            else:
                self._holders.setdefault(block, set()).add(row)
            held[block] = None

    def new(self, row: int, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that are not remembered."""
        held = self._held.get(row, {})
        return [block for block in blocks if block not in held]

    def remove(self, row: int, blocks: Iterable[int]) -> None:
        """Forget these, as far as they are remembered."""
        held = self._held.get(row, {})
        for block in blocks:
            if block in held:
                del held[block]
                self._drop(block, row)

    def trim(self, row: int, most: int) -> list[int]:
        """Forget the longest unused until `most` blocks are left; returns them, the longest unused first."""
        held = self._held.get(row, {})
        gone = []
        while len(held) > most:
            block = next(iter(held))
            del held[block]
            self._drop(block, row)
            gone.append(block)
        return gone

    def forget(self, row: int) -> None:
        """Its cache was cleared, or it is gone."""
        for block in self._held.pop(row, {}):
            self._drop(block, row)

    def longest_first(self, blocks: Sequence[int]) -> Iterator[tuple[int, set[int]]]:
        """(blocks in common, rows that hold that many), the most in common first; a set holds those before it too.

        >>> memory = PrefixMemory()
        >>> memory.remember(0, [11, 12, 13]); memory.remember(1, [11])
        >>> list(memory.longest_first([11, 12, 99]))
        [(2, {0}), (1, {0, 1})]
        """
        sets = []
        for block in blocks:
            if not (holders := self._holders.get(block)):
                break
            sets.append(holders)
        for i in range(len(sets) - 1, -1, -1):
            if i == len(sets) - 1 or len(sets[i]) > len(sets[i + 1]):
                yield i + 1, sets[i]

    def _drop(self, block: int, row: int) -> None:
        holders = self._holders[block]
        holders.discard(row)
        if not holders:
            del self._holders[block]
