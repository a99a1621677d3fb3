"""What a prefix cache holds, and what a listener has not heard of it yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from psrl.protocol.generation import CacheEvents


class HeldBlocks:
    """Block names (psrl.protocol.blocks) come and go in any order and number; `news` is the net change.

    >>> blocks = HeldBlocks()
    >>> blocks.store([1, 2]); blocks.remove([2]); blocks.store([3])
    >>> blocks.news()
    CacheEvents(cleared=False, removed=[], stored=[1, 3])
    >>> blocks.news() is None
    True
    >>> blocks.remove([1]); blocks.store([1]); blocks.remove([3])
    >>> blocks.news()
    CacheEvents(cleared=False, removed=[3], stored=[])
    """

    def __init__(self) -> None:
        self._held: dict[int, None] = {}
        """In the order in which they came: of one sequence the earlier blocks first."""
        self._told: set[int] = set()
        self._changed: dict[int, None] = {}
        """Exactly those that are held but not told, or told but not held. The former in the order in which they came."""
        self._void = False
        """The listener is to forget all that it has heard."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: int) -> bool:
        return name in self._held

    def store(self, names: Iterable[int]) -> None:
        """These are held from now on; names that follow one another come in this order."""
        for name in names:
            if name not in self._held:
                self._held[name] = None
                self._differs(name, name not in self._told)

    def remove(self, names: Iterable[int]) -> None:
        """These are held no more; unknown ones are ignored."""
        for name in names:
            if name in self._held:
                del self._held[name]
                self._differs(name, name in self._told)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._void = self._void or bool(self._told)
        self._held.clear()
        self._told.clear()
        self._changed.clear()

    def apply(self, events: CacheEvents) -> None:
        """Follow another cache's report."""
        if events.cleared:
            self.clear()
        self.remove(events.removed)
        self.store(events.stored)

    def forget_listener(self) -> None:
        """Whoever listens from now on knows nothing, or something else: tell everything anew."""
        self._told.clear()
        self._changed = dict(self._held)
        self._void = True

    @property
    def has_news(self) -> bool:
        return self._void or bool(self._changed)

    def news(self, most: int | None = None) -> CacheEvents | None:
        """What has changed since the last call, at most `most` names of it and the rest next time; None if nothing has."""
        if not self.has_news:
            return None
        part = list(islice(self._changed, most))
        stored = [name for name in part if name in self._held]
        removed = [name for name in part if name not in self._held]
        for name in part:
            del self._changed[name]
        self._told.difference_update(removed)
        self._told.update(stored)
        cleared, self._void = self._void, False
        return CacheEvents(cleared=cleared, removed=removed, stored=stored)

    def _differs(self, name: int, differs: bool) -> None:
        if differs:
            self._changed[name] = None
        else:
            del self._changed[name]
