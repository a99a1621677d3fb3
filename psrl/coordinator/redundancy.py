"""Redundancy: which reservations give way when more groups are in flight than can train. Arithmetic on the open window.

With B' > B reservations, B of which train, those that finish late give way. A prompt that gave way once is *protected*
when it comes again: it has a place among the B from the moment it is reserved. Three things hold at any time:

1. all reservations fit into the room for reservations (B' a buffer, see window.py),
2. the protected ones fit into the `places` that train (B a buffer),
3. each other one, taken alone, could still take a place and leave every protected one its own.

Lists have one element a buffer of the window, in buffer order, as in window.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from psrl.coordinator.window import fits, slack


def free_places(places: Sequence[int], protected: Sequence[int]) -> list[bool]:
    """Whether a group that is not protected may take a place of each buffer, with all `protected` (by deadline) still
    served; `free_places([1, 1], [1, 0]) == [False, True]`, `free_places([1, 1], [0, 1]) == [True, True]`."""
    left = list(accumulate(reversed(slack(places, protected)), min))[::-1]
    return [place > 0 and spare > 0 for place, spare in zip(places, left, strict=True)]


def reachable(places: Sequence[int], protected: Sequence[int]) -> list[bool]:
    """Whether a reservation with each deadline has a free place in time; `reachable([1, 1], [1, 0]) == [False, True]`."""
    return list(accumulate(free_places(places, protected), lambda a, b: a or b))


def all_served(places: Sequence[int], due: Sequence[int], protected: Sequence[int]) -> bool:
    """Rules 2 and 3; `due` counts all reservations, the protected ones among them.

    `all_served([2], [3], [1])`, but not `all_served([2], [3], [2])`: the third could take no place any more.
    """
    if not fits(places, protected):
        return False
    first = next((i for i, (all_, own) in enumerate(zip(due, protected, strict=True)) if all_ > own), None)
    return first is None or reachable(places, protected)[first]
