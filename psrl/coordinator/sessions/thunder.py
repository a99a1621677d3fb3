"""ThunderAgent's decisions: who hangs when an instance has promised more KV than it has, who goes on when there is room. Pure.

Nothing in flight is aborted: a session hangs between two turns. Those that are there already, at their environment, hang
at once; those that generate are marked and hang when their turn ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from psrl.coordinator.sessions.session import AWAY, Key


@dataclass(frozen=True, slots=True)
class Holder:
    """A session that counts at an instance. `frees`: what `remaining` would rise by if it hung."""

    key: Key
    state: str
    tokens: int
    frees: float


@dataclass(frozen=True, slots=True)
class Room:
    """An instance that may take a session now. `idle`: nobody holds KV there."""

    name: str
    remaining: float
    idle: bool


def to_hang(remaining: float, holders: Iterable[Holder]) -> list[Key]:
    """As few as needed so that `remaining` is no longer negative: those away first, then the smallest.

    >>> to_hang(-150, [Holder((0, 0), "generating", 90, 90), Holder((0, 1), "away", 200, 100), Holder((0, 2), "generating", 80, 80)])
    [(0, 1), (0, 2)]
    """
    chosen: list[Key] = []
    if remaining < 0:
        for holder in sorted(holders, key=lambda h: (h.state != AWAY, h.tokens, h.key)):
            chosen.append(holder.key)
            remaining += holder.frees
            if remaining >= 0:
                break
    return chosen


def next_bucketed(room: Room, waiting: Iterable[tuple[int, Key]], needs: Callable[[Key], float]) -> Key | None:
    """Who goes on at the instance that it occupied, out of (tokens, key): the smallest, if it fits or nobody is there.

    >>> next_bucketed(Room("a", 99, False), [(300, (0, 0)), (90, (1, 0))], {(0, 0): 300, (1, 0): 90}.get)
    (1, 0)
    """
    smallest = min(waiting, default=None)
    if smallest is None or not (room.idle or needs(smallest[1]) <= room.remaining):
        return None
    return smallest[1]


def next_global(
    rooms: Iterable[Room],
    waiting: Iterable[tuple[int, Key]],
    needs: Callable[[Key, str], float],
    may_take: Callable[[Key, str], bool],
) -> tuple[Key, str] | None:
    """Best fit decreasing: the largest that fits anywhere, at the instance where it leaves least. Where nothing fits, the
    largest goes where nobody is.

    >>> next_global([Room("a", 500, False), Room("b", 350, False)], [(300, (0, 0)), (90, (1, 0))], lambda key, name: 300, lambda *_: True)
    ((0, 0), 'b')
    """
    rooms = list(rooms)
    order = sorted(waiting, key=lambda w: (-w[0], w[1]))
    for _, key in order:
        fits = [(r.remaining - needs(key, r.name), r.name) for r in rooms if may_take(key, r.name)]
        if best := min((f for f in fits if f[0] >= 0), default=None):
            return key, best[1]
    for _, key in order:
        if idle := min((r.name for r in rooms if r.idle and may_take(key, r.name)), default=None):
            return key, idle
    return None
