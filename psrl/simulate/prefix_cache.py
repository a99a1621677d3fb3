"""An engine's prefix cache on the virtual clock: whole blocks, counted references, the longest unused evicted first.

A running sample holds its blocks; samples that begin alike hold the same ones. When it leaves they stay, its last block the
first to go, until the room is needed. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from psrl.protocol.generation import CacheEvents
from psrl.simulate.samples import SimSample

SHIFT = 24
"""Blocks of one sequence have consecutive names, fewer than 2^24 of them."""


def shared_names(first: int, end: int) -> range:
    """Blocks `first` to `end` of what all prompts begin with."""
    return range(first, end)


def prompt_names(prompt: int, first: int, end: int) -> range:
    base = (2 * prompt + 1) << SHIFT
    return range(base + first, base + end)


def own_names(group: int, sample: int, first: int, end: int) -> range:
    base = (2 * (group << 16 | sample) + 2) << SHIFT
    return range(base + first, base + end)


class Blocks:
    """Names of the whole blocks of any sample. `shared_tokens`: what all prompts begin with.

    With blocks of 16, 32 shared tokens, a prompt of 50 and 20 tokens after it: two shared blocks, one of the prompt, one own.
    """

    def __init__(self, size: int, shared_tokens: int = 0) -> None:
        self.size = size
        self.shared_tokens = shared_tokens

    def of_prompt(self, prompt: int, tokens: int) -> list[int]:
        """The whole blocks of a prompt of so many tokens."""
        shared = min(self.shared_tokens, tokens) // self.size
        return [*shared_names(0, shared), *prompt_names(prompt, shared, tokens // self.size)]

    def of_sample(self, sample: SimSample, tokens: int) -> list[int]:
        """Those of the first `tokens` of a sample."""
        group = sample.group
        names = self.of_prompt(group.prompt, min(tokens, group.prompt_tokens))
        return [*names, *own_names(group.number, sample.index, len(names), tokens // self.size)]


class PrefixCache:
    """
    >>> cache = PrefixCache(Blocks(16))
    >>> cache.hold([1, 2]); cache.release([1, 2, 3]); cache.shrink(2); cache.hold([1, 2, 3, 4])
    0
    2
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.shared_blocks = 0
        """Places that running samples do without, since another one holds the same block."""
        self._held: dict[int, int] = {}
        self._unused: dict[int, None] = {}
        """The longest unused first."""
        self._cleared = False
        self._removed: dict[int, None] = {}
        self._stored: dict[int, None] = {}

    def holds(self, name: int) -> bool:
        """Whether a running sample holds the block."""
        return name in self._held

    def hold(self, names: Sequence[int]) -> int:
        """A sample begins to run with these blocks; returns how many of the first were here."""
        held, unused, stored = self._held, self._unused, self._stored
        hits, all_here = 0, True
        for name in names:
            if name in held:
                held[name] += 1
                self.shared_blocks += 1
            else:
                held[name] = 1
                if name in unused:
                    del unused[name]
                else:
                    stored[name] = None
                    all_here = False
            hits += all_here
        return hits

    def release(self, names: Sequence[int]) -> None:
        """It leaves with these, of which the last ones may be new."""
        held, unused, stored = self._held, self._unused, self._stored
        for name in reversed(names):
            count = held.get(name, 0)
            if count > 1:
                held[name] = count - 1
                self.shared_blocks -= 1
                continue
            if count:
                del held[name]
            elif name in unused:
                del unused[name]  # and last again
            else:
                stored[name] = None
            unused[name] = None

    def shrink(self, most: int) -> None:
        """Keep no more than `most` blocks that nobody runs with."""
        while len(self._unused) > max(0, most):
            name = next(iter(self._unused))
            del self._unused[name]
            if name in self._stored:
                del self._stored[name]
            else:
                self._removed[name] = None

    def clear(self) -> None:
        """New weights; nothing runs."""
        self._held.clear()
        self._unused.clear()
        self._removed.clear()
        self._stored.clear()
        self.shared_blocks, self._cleared = 0, True

    @property
    def has_news(self) -> bool:
        return bool(self._cleared or self._removed or self._stored)

    def take_news(self) -> CacheEvents:
        """What changed since the last call."""
        events = CacheEvents(cleared=self._cleared, removed=list(self._removed), stored=list(self._stored))
        self._cleared = False
        self._removed.clear()
        self._stored.clear()
        return events
