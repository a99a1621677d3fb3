"""Do all open reservations still find a place in time? Arithmetic on the window of open buffers.

Two short lists describe a window, one element a buffer, in buffer order:

- `room[i]`: how many more groups the buffer can still promise a place to,
- `due[i]`: how many open reservations may land in this buffer at the latest (their deadline).

A reservation may land in any buffer up to its deadline, so the sets of allowed places are nested, and Hall's marriage
condition shrinks to one comparison a buffer: those due by buffer i are no more than the room up to buffer i.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def slack(room: Sequence[int], due: Sequence[int]) -> list[int]:
    """Room left up to each buffer after all that is due by then; `slack([1, 2], [0, 2]) == [1, 1]`."""
    return list(accumulate(r - d for r, d in zip(room, due, strict=True)))


def fits(room: Sequence[int], due: Sequence[int]) -> bool:
    """Hall's condition; `fits([1, 1], [0, 2])` but not `fits([1, 1], [2, 0])`."""
    balance = 0
    for r, d in zip(room, due, strict=True):
        balance += r - d
        if balance < 0:
            return False
    return True


def surplus(room: Sequence[int], due: Sequence[int]) -> list[int]:
    """How many reservations must go, as few as possible: element i of them among those due by buffer i.

    `surplus([1, 1], [2, 1]) == [1, 0]`: one of the first two goes, then the other two fit.
    """
    gone = []
    balance = 0
    for r, d in zip(room, due, strict=True):
        balance += r - d
        gone.append(max(0, -balance))
        balance = max(0, balance)
    return gone


def latest_places(room: Sequence[int], due: Sequence[int]) -> list[int]:
    """Reservations as a reader may picture them, each in its latest possible buffer;
    `latest_places([2, 1], [0, 2]) == [1, 1]`."""
    places = [0] * len(room)
    unplaced = 0
    for i in range(len(room) - 1, -1, -1):
        unplaced += due[i]
        places[i] = min(unplaced, room[i])
        unplaced -= places[i]
    return places
