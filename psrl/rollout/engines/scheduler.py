"""Who decodes, in which row of the KV cache, and who waits. Pure bookkeeping: no tensors, no clock.

Running sequences fill rows 0 .. n-1 without a hole; row i belongs to `running[i]`. A running sequence has keys and
values of all its tokens but the last one, which the next decode step feeds in. So the first token after a prompt is
sampled exactly like every later one, and samples of one group share the prefill of their prompt by copying rows.

What sequences leave behind is kept in blocks (`PrefixCache`) as long as the running ones do not need the room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from psrl.protocol.blocks import ROOT, block_names
from psrl.protocol.generation import SamplingParams
from psrl.rollout.engines.prefix_cache import BlockRun, PrefixCache

HEADROOM_TOKENS = 16
"""Growth reserved for each running sequence at admission: without it a full cache would admit a sequence only to
preempt it a step later, and pay its prefill every time."""

Move = tuple[int, int]
"""(source row, destination row): the last rows move into the rows that became free."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample on its way. `token_ids` holds prompt, prefix and new tokens; `num_new` counts the last kind."""

    order: int
    """Arrival number; the youngest has the highest."""
    group: int
    sample: int
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    budget: int
    """Most new tokens that this request may produce; at least 1."""
    seed: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    num_new: int = 0
    block_names: list[int] = field(default_factory=list)
    """Names of the first blocks of `token_ids`: as many as were asked for so far."""

    @property
    def remaining(self) -> int:
        return self.budget - self.num_new

    @property
    def is_fresh(self) -> bool:
        """Nothing but the prompt so far: a row of the same prompt can lend its keys and values."""
        return len(self.token_ids) == len(self.prompt_ids)

    def whole_blocks(self, size: int) -> list[int]:
        """Names of the whole blocks of all tokens but the last, whose keys and values nobody has."""
        names = self.block_names
        rest = self.token_ids[len(names) * size : -1]
        if len(rest) >= size:
            names += block_names(rest, size, before=names[-1] if names else ROOT)
        return names


@dataclass(frozen=True, slots=True)
class Admission:
    """`sequence` now owns `row`. Its KV is copied from `donor_row` where that is set; otherwise its first blocks are copied
    from the slots in `cached` and the rest is prefilled."""

    sequence: Sequence
    row: int
    donor_row: int | None
    cached: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Tokens in the cached blocks."""

    @property
    def num_to_prefill(self) -> int:
        return 0 if self.donor_row is not None else len(self.sequence.token_ids) - 1 - self.num_cached


class Departures(NamedTuple):
    """Sequences that no longer own a row, and how the others close the holes. Until the moves are made the rows are as they were left."""

    left: list[tuple[int, Sequence]]
    """(row, sequence)."""
    moves: list[Move]


def compaction_moves(num_rows: int, freed: Collection[int]) -> list[Move]:
    """Moves that leave the surviving rows in 0 .. num_rows - len(freed) - 1; `compaction_moves(4, {1}) == [(3, 1)]`."""
    kept = num_rows - len(freed)
    sources = (row for row in range(kept, num_rows) if row not in freed)
    holes = (row for row in sorted(freed) if row < kept)
    return list(zip(sources, holes, strict=True))


class Scheduler:
    """First come, first served within `max_num_seqs` rows and `kv_cache_tokens` tokens; the youngest yields.

    `block_size`: tokens of a block of the prefix cache, 0 for none. Its blocks and the running rows together are at most
    `kv_cache_tokens`: to a sequence that wants to run, cached tokens are free room.
    """

    def __init__(self, *, max_num_seqs: int, kv_cache_tokens: int, block_size: int = 0) -> None:
        self.max_num_seqs = max_num_seqs
        self.kv_cache_tokens = kv_cache_tokens
        self.cache = PrefixCache(block_size) if block_size else None
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.kv_tokens = 0
        """Tokens that the running rows hold once the next decode step has fed their last ones in."""
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self, prefill_budget: int) -> tuple[list[Admission], bool]:
        """Give rows to waiting sequences, `prefill_budget` tokens to prefill at a time (a longer one goes alone).

        Returns the admissions, and True if only the prefill budget kept more from being admitted now.
        """
        admissions: list[Admission] = []
        more = False
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return admissions, more
        room = self.kv_cache_tokens - self.kv_tokens - sum(min(HEADROOM_TOKENS, s.remaining) for s in self.running)
        donors: dict[int, int] = {}
        for row, sequence in enumerate(self.running):
            donors.setdefault(sequence.group, row)
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            need = len(sequence.token_ids) + min(HEADROOM_TOKENS, sequence.remaining)
            if self.running and need > room:
                break
            donor = donors.get(sequence.group) if sequence.is_fresh else None
            if donor is not None and self.running[donor].prompt_ids != sequence.prompt_ids:
                donor = None
            cost = 0 if donor is not None else len(sequence.token_ids) - 1 - self._num_cached(sequence)
            if more := bool(admissions) and cost > prefill_budget:
                break
            self.waiting.popleft()
            admission = self._admission(sequence, len(self.running), donor)
            self.running.append(sequence)
            self.kv_tokens += len(sequence.token_ids)
            room -= need
            prefill_budget -= cost
            donors.setdefault(sequence.group, admission.row)
            admissions.append(admission)
        self._make_room()
        return admissions, more

    def _num_cached(self, sequence: Sequence) -> int:
        """Tokens of this sequence that the prefix cache holds."""
        if self.cache is None:
            return 0
        size = self.cache.block_size
        return size * self.cache.cached(sequence.whole_blocks(size))

    def _admission(self, sequence: Sequence, row: int, donor_row: int | None) -> Admission:
        if self.cache is None or donor_row is not None:
            return Admission(sequence, row, donor_row)
        size = self.cache.block_size
        slots = self.cache.hit(sequence.whole_blocks(size))
        return Admission(sequence, row, None, slots, size * len(slots))

    def preempt(self) -> Departures:
        """Send the youngest back to the head of the queue until the next decode step fits into the cache."""
        freed: set[int] = set()
        tokens = self.kv_tokens
        by_age = sorted(range(len(self.running)), key=lambda row: self.running[row].order) if self._is_over() else []
        while tokens > self.kv_cache_tokens and len(by_age) > 1:
            row = by_age.pop()
            freed.add(row)
            tokens -= len(self.running[row].token_ids)
            self.waiting.appendleft(self.running[row])
        self.preemptions += len(freed)
        return self.release(freed)

    def _is_over(self) -> bool:
        return self.kv_tokens > self.kv_cache_tokens

    def grow(self) -> None:
        """Every running sequence just got one more token."""
        self.kv_tokens += len(self.running)

    def release(self, rows: Collection[int]) -> Departures:
        """Take these rows away and close the holes; the caller moves the KV rows likewise."""
        if not rows:
            self._make_room()
            return Departures([], [])
        moves = compaction_moves(len(self.running), rows)
        left = [(row, self.running[row]) for row in sorted(rows)]
        self.kv_tokens -= sum(len(sequence.token_ids) for _, sequence in left)
        for source, hole in moves:
            self.running[hole] = self.running[source]
        del self.running[len(self.running) - len(rows) :]
        self._make_room()
        return Departures(left, moves)

    def keep(self, left: Iterable[tuple[int, Sequence]]) -> list[BlockRun]:
        """Cache the whole blocks of what has left, as far as there is room. Returns what is to be copied: the rows must still
        be as they were left."""
        if self.cache is None:
            return []
        size = self.cache.block_size
        room = (self.kv_cache_tokens - self.kv_tokens) // size
        return [BlockRun(row, *self.cache.keep(sequence.whole_blocks(size), room)) for row, sequence in left]

    def _make_room(self) -> None:
        if self.cache is not None:
            self.cache.shrink((self.kv_cache_tokens - self.kv_tokens) // self.cache.block_size)

    def forget_kv(self) -> None:
        """All KV became void: nothing is cached, and every running sequence waits again, ahead of the others and in order of
        arrival."""
        if self.cache is not None:
            self.cache.clear()
        self.waiting.extendleft(sorted(self.running, key=lambda sequence: -sequence.order))
        self.running.clear()
        self.kv_tokens = 0

    def abort_waiting(self) -> list[Sequence]:
        """Forget the sequences that wait; returns them."""
        dropped = list(self.waiting)
        self.waiting.clear()
        return dropped

    def abort(self, groups: Iterable[int] | None) -> tuple[list[Sequence], Departures]:
        """Forget the sequences of these groups (all if None), running and waiting ones. Returns them and who left a row."""
        wanted = None if groups is None else frozenset(groups)
        return self._drop(lambda s: wanted is None or s.group in wanted)

    def abort_samples(self, samples: Collection[tuple[int, int]]) -> tuple[list[Sequence], Departures]:
        """Forget these (group, sample), as `abort` does."""
        return self._drop(lambda s: (s.group, s.sample) in samples)

    def _drop(self, wanted: Callable[[Sequence], bool]) -> tuple[list[Sequence], Departures]:
        departures = self.release({row for row, s in enumerate(self.running) if wanted(s)})
        dropped = [sequence for _, sequence in departures.left] + [s for s in self.waiting if wanted(s)]
        self.waiting = deque(s for s in self.waiting if not wanted(s))
        return dropped, departures
