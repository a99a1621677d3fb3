"""Which sample goes into which micro-batch of which rank: one pure plan for the whole optimizer step.

Every rank computes the same plan from the sample lengths alone, so all ranks run the same number of micro-batches
and no collective is left waiting.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOKEN_LIMIT_KEY = "train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu"

MICRO_BATCH_COST = 64
"""Fixed cost of one more micro-batch (launches, hooks, collectives), in padded tokens that would cost as much."""


@dataclass(frozen=True, slots=True)
class TrainableSamples:
    """`lengths`: tokens of each sample in batch order, 0 for those that are left out.

    `invalid_samples` had no finite reward or an empty response; `dropped_groups` have too few samples left.
    """

    lengths: list[int]
    invalid_samples: int
    dropped_groups: list[int]


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """`ranks[r][i]` are the sample indices of micro-batch i of rank r, longest first; `()` is a dummy micro-batch.

    Every rank has the same number of micro-batches. `left_out` samples had length 0.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    left_out: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])


def trainable_samples(tokens: Sequence[Sequence[int]], least_valid: int = 2) -> TrainableSamples:
    """Flatten the lengths of each group's samples; a group with fewer than `least_valid` trainable ones is left out whole.

    `trainable_samples([[5, 0, 6], [0, 7]])` has lengths [5, 0, 6, 0, 0], 2 invalid samples and dropped group 1.
    """
    lengths: list[int] = []
    invalid, dropped = 0, []
    for group, sizes in enumerate(tokens):
        valid = sum(size > 0 for size in sizes)
        invalid += len(sizes) - valid
        if valid < least_valid:
            dropped.append(group)
            lengths.extend(0 for _ in sizes)
        else:
            lengths.extend(sizes)
    return TrainableSamples(lengths, invalid, dropped)


def mini_batches(num_groups: int, groups_per_step: int | None) -> list[range]:
    """Groups of each optimizer step, in batch order; the last one is the remainder.

    `mini_batches(5, 2) == [range(0, 2), range(2, 4), range(4, 5)]`; None takes the whole buffer in one step.
    """
    size = num_groups if groups_per_step is None else groups_per_step
    if num_groups > 0 and size < 1:
        raise ValueError(
            f"train_actor_rollout_ref.actor.ppo_mini_batch_size is {groups_per_step}; it must be at least 1, or null"
        )
    return [range(start, min(start + size, num_groups)) for start in range(0, num_groups, max(size, 1))]


def plan_micro_batches(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, micro_batch_cost: int = MICRO_BATCH_COST
) -> MicroBatchPlan:
    """Deal the samples to ranks, balanced by tokens, then cut each rank's into micro-batches with little padding.

    A micro-batch of rows with lengths l_1 >= l_2 >= ... costs rows x l_1 (padding included), which never exceeds
    `max_tokens`. Samples of length 0 are left out and counted. The plan depends on the arguments only.

    `plan_micro_batches([7] * 8, 1, 8)` has 8 micro-batches of one row. Raises ValueError for a sample longer than
    `max_tokens`, naming its length.
    """
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sample {index} of the batch has {length} tokens, but {TOKEN_LIMIT_KEY} is {max_tokens}: raise it to"
                " at least data.max_prompt_length + data.max_response_length, or lower those"
            )
    order = sorted((i for i, length in enumerate(lengths) if length > 0), key=lambda i: (-lengths[i], i))
    packed = [
        _pack(indices, [lengths[i] for i in indices], max_tokens, micro_batch_cost)
        for indices in _deal(order, lengths, num_ranks)
    ]
    count = max(len(batches) for batches in packed)
    ranks = tuple(tuple(batches + [()] * (count - len(batches))) for batches in packed)
    return MicroBatchPlan(ranks, left_out=len(lengths) - len(order))


def _deal(order: Sequence[int], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Longest first, each to the rank with the fewest tokens so far (ties to the lowest rank)."""
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in order:
        load, rank = loads[0]
        dealt[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return dealt


def _pack(indices: Sequence[int], lengths: Sequence[int], max_tokens: int, cost: int) -> list[tuple[int, ...]]:
    """Cut rows sorted longest first into runs of least total (rows x longest + cost), each within `max_tokens`.

    Exact by dynamic programming over the last cut: best[end] = min over start of best[start] + (end - start) *
    lengths[start] + cost. The feasible starts of `end` are a suffix that only moves right.
    """
    size = np.asarray(lengths, dtype=np.int64)
    position = np.arange(len(size) + 1, dtype=np.int64)
    best = np.zeros(len(size) + 1, dtype=np.int64)
    last_cut = [0] * (len(size) + 1)
    first = 0
    for end in range(1, len(size) + 1):
        while (end - first) * size[first] > max_tokens:
            first += 1
        totals = best[first:end] + (end - position[first:end]) * size[first:end]
        choice = int(totals.argmin())
        best[end] = totals[choice] + cost
        last_cut[end] = first + choice
    runs: list[tuple[int, ...]] = []
    end = len(size)
    while end > 0:
        runs.append(tuple(indices[last_cut[end] : end]))
        end = last_cut[end]
    return runs[::-1]
