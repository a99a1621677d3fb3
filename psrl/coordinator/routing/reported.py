"""Rows whose engines say what they hold, and what was sent there that is not in their word yet. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable


class Reported:
    """What is sent to an instance is believed to be cached there until its second report: the first one may have been on its
    way already. A block that no report has named by then was never stored, or was evicted at once.

    >>> reported = Reported()
    >>> reported.hear(0, []); reported.sent(0, [7, 8]); reported.hear(0, [7]); reported.hear(0, [])
    []
    []
    [8]
    """

    def __init__(self) -> None:
        self._sent: dict[int, tuple[set[int], set[int]]] = {}
        """Of each such row, the blocks sent since its last report and those sent before that."""

    def __contains__(self, row: int) -> bool:
        return row in self._sent

    def sent(self, row: int, blocks: Iterable[int]) -> None:
        """Blocks that the row was not known to hold are on their way there."""
        self._sent[row][0].update(blocks)

    def hear(self, row: int, stored: Iterable[int]) -> list[int]:
        """A report came; returns the blocks that are to be believed in no longer."""
        new, old = self._sent.get(row, (set(), set()))
        new.difference_update(stored)
        old.difference_update(stored)
        self._sent[row] = set(), new
        return sorted(old)

    def clear(self, row: int) -> None:
        """Its cache is empty; it goes on reporting."""
        if row in self._sent:
            self._sent[row] = set(), set()

    def forget(self, row: int) -> None:
        self._sent.pop(row, None)
