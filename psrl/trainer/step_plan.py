"""The micro-batches of a training step, planned while its buffer still fills. Pure.

A micro-batch is planned as soon as its samples are there, and the plan is the same however the buffer is cut into chunks:
micro-batches never cross mini-batches, and those of a fixed number of samples lie one after the other in batch order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from psrl.trainer.micro_batches import MICRO_BATCH_COST, plan_micro_batches, trainable_lengths
from psrl.trainer.rows import Row, separate_rows, shared_rows

RankRows = tuple[tuple[Row, ...], ...]
"""One micro-batch: the rows of each rank; none: a dummy there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """`mini_groups`: groups of an optimizer step. `least_valid`: trainable samples without which a group is left out.
    `micro_samples`: samples of a micro-batch on each rank; None: as many as `max_tokens` on each GPU allow, of which there are
    `row_ranks` to a row, with a part of it each. `num_ranks`: those that work on different samples. `hidden_size`: of a model
    whose rows may share prompts; None: each sample is a row. Not `padded`: the model computes nothing for padding.
    `micro_batch_cost`: tokens that cost as much as one more micro-batch."""

    mini_groups: int
    least_valid: int
    micro_samples: int | None
    num_ranks: int
    max_tokens: int
    hidden_size: int | None
    row_ranks: int = 1
    padded: bool = True
    micro_batch_cost: int = MICRO_BATCH_COST["cpu"]


@dataclass(frozen=True, slots=True)
class PlannedMini:
    """Micro-batches of mini-batch `number` that can be worked on now; `complete`: it has no further ones."""

    number: int
    batches: list[RankRows]
    complete: bool


@dataclass(slots=True)
class StepPlan:
    """Tell it of the groups as they arrive; it answers with what can be worked on."""

    settings: PlanSettings
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sample in batch order, 0 for those that are left out."""
    group_of: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    _first_sample: list[int] = field(default_factory=lambda: [0])
    _mini: int = 0
    _next: int = 0

    def extend(
        self, tokens: Sequence[Sequence[int]], prompt_tokens: Sequence[int], samples: int, last: bool
    ) -> list[PlannedMini]:
        """These groups have arrived (tokens of each sample, of each prompt), and the first `samples` samples of the buffer
        may be worked on; `last`: that is all of it.

        With mini-batches of 2 groups of 3 samples, 2 ranks and micro-batches of 2 samples a rank, samples 0-3 are a
        micro-batch (0, 1 of rank 0), samples 4, 5 the next (none of rank 1), and samples 6-9 begin the second mini-batch.
        """
        for sizes in tokens:
            self.group_of += [len(self._first_sample) - 1] * len(sizes)
            self._first_sample.append(self._first_sample[-1] + len(sizes))
        self.lengths += trainable_lengths(tokens, self.settings.least_valid)
        self.prompt_tokens += prompt_tokens
        planned: list[PlannedMini] = []
        while self._mini * self.settings.mini_groups < len(self._first_sample) - 1:
            part = self._plan(samples, last)
            if part.batches or part.complete:
                planned.append(part)
            if not part.complete:
                break
            self._mini += 1
        return planned

    def _plan(self, samples: int, last: bool) -> PlannedMini:
        end_group = (self._mini + 1) * self.settings.mini_groups
        known = end_group < len(self._first_sample) or last
        end = self._first_sample[min(end_group, len(self._first_sample) - 1)]
        if self.settings.micro_samples is None:
            return self._by_tokens(end, complete=known and end <= samples)
        return self._by_count(self.settings.micro_samples, end, samples, known)

    def _by_tokens(self, end: int, complete: bool) -> PlannedMini:
        if not complete:
            return PlannedMini(self._mini, [], False)
        rows = self._rows(self._next, end)
        self._next = end
        parts = [-(-row.length // self.settings.row_ranks) for row in rows]
        settings = self.settings
        plan = plan_micro_batches(
            parts, settings.num_ranks, settings.max_tokens, settings.micro_batch_cost, padded=settings.padded
        )
        batches = [
            tuple(tuple(rows[i] for i in rank[number]) for rank in plan.ranks)
            for number in range(plan.num_micro_batches)
        ]
        return PlannedMini(self._mini, batches, True)

    def _by_count(self, size: int, end: int, samples: int, known: bool) -> PlannedMini:
        batches: list[RankRows] = []
        while self._next < end:
            stop = self._next + size * self.settings.num_ranks
            if known:
                stop = min(stop, end)
            if stop > samples:
                break
            starts = range(self._next, self._next + size * self.settings.num_ranks, size)
            ranks = tuple(tuple(self._rows(min(start, stop), min(start + size, stop))) for start in starts)
            if any(ranks):  # else nothing in it may be trained
                batches.append(ranks)
            self._next = stop
        return PlannedMini(self._mini, batches, known and self._next == end)

    def _rows(self, start: int, stop: int) -> list[Row]:
        """Rows of samples [start, stop)."""
        lengths, groups, settings = self.lengths[start:stop], self.group_of[start:stop], self.settings
        if settings.hidden_size is None:
            rows = separate_rows(lengths)
        else:
            longest = settings.max_tokens * settings.row_ranks
            rows = shared_rows(lengths, groups, self.prompt_tokens, settings.hidden_size, longest)
        return [Row(tuple(start + i for i in row.samples), row.length) for row in rows]
