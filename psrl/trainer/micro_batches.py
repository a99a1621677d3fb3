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

MICRO_BATCH_COST = {"cpu": 64, "cuda": 4096}
"""Fixed cost of one more micro-batch (launches, hooks, collectives) by device, in padded tokens that would cost as much. On an H200
it was 2,400 to 10,000 of them (0.6B and 1.7B, both backends; benchmarks/results/2026-12-01-gpu-packing.txt)."""


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """`ranks[r][i]` are the sample indices of micro-batch i of rank r, longest first; `()` is a dummy micro-batch.

    Every rank has the same number of micro-batches. Samples of length 0 are in none.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])


def trainable_lengths(tokens: Sequence[Sequence[int]], least_valid: int = 2) -> list[int]:
    """Tokens of each sample in batch order, 0 for those that are left out: not trainable (0), or in a group with fewer than
    `least_valid` trainable ones. `trainable_lengths([[5, 0, 6], [0, 7]]) == [5, 0, 6, 0, 0]`.
    """
    lengths: list[int] = []
    for sizes in tokens:
        enough = sum(size > 0 for size in sizes) >= least_valid
        lengths += sizes if enough else [0] * len(sizes)
    return lengths


def plan_micro_batches(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    micro_batch_cost: int = MICRO_BATCH_COST["cpu"],
    *,
    padded: bool = True,
) -> MicroBatchPlan:
    """Deal the samples to ranks, balanced by tokens, then cut each rank's into micro-batches with little padding. `lengths` are
    in tokens of one GPU: where several share a row, of its part.

    A micro-batch of rows with lengths l_1 >= l_2 >= ... costs rows x l_1 (padding included), which never exceeds
    `max_tokens`. Not `padded`: it costs the sum of its lengths, which does not, and a rank's micro-batches are few and, where
    that works out, equal. Samples of length 0 are left out. The plan depends on the arguments only.

    `plan_micro_batches([7] * 8, 1, 8)` has 8 micro-batches of one row; `plan_micro_batches([6, 1, 1], 1, 8, padded=False)`
    has one of all. Raises ValueError for a sample longer than `max_tokens`, naming its length.
    """
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sample {index} of the batch has {length} tokens on a GPU, but {TOKEN_LIMIT_KEY} is {max_tokens}: raise it to"
                " at least data.max_prompt_length + data.max_response_length, over the ranks that share a row, or lower those"
            )
    order = sorted((i for i, length in enumerate(lengths) if length > 0), key=lambda i: (-lengths[i], i))
    dealt = _deal(order, lengths, num_ranks)
    if padded:
        packed = [_pack(indices, [lengths[i] for i in indices], max_tokens, micro_batch_cost) for indices in dealt]
    else:
        packed = _fill(dealt, lengths, max_tokens)
    count = max(len(batches) for batches in packed)
    return MicroBatchPlan(tuple(tuple(batches + [()] * (count - len(batches))) for batches in packed))


def _deal(order: Sequence[int], lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Longest first, each to the share (a rank, a micro-batch) with the fewest tokens so far (ties to the lowest)."""
    dealt: list[list[int]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for index in order:
        load, share = loads[0]
        dealt[share].append(index)
        heapq.heapreplace(loads, (load + lengths[index], share))
    return dealt


def _fill(dealt: Sequence[Sequence[int]], lengths: Sequence[int], max_tokens: int) -> list[list[tuple[int, ...]]]:
    """Cut each rank's samples, longest first, into as few micro-batches within `max_tokens` as first fit finds, as many as the
    rank with the most has, and equal ones where that works out: they run side by side."""
    fitted = [_first_fit(indices, lengths, max_tokens) for indices in dealt]
    count = max(map(len, fitted))
    filled = []
    for indices, tight in zip(dealt, fitted, strict=True):
        even = _deal(indices, lengths, count)
        fits = all(sum(lengths[i] for i in batch) <= max_tokens for batch in even)
        filled.append([tuple(batch) for batch in (even if fits else tight)])
    return filled


def _first_fit(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Each to the first micro-batch that still has room for it."""
    batches: list[list[int]] = []
    room = np.full(len(indices), max_tokens, dtype=np.int64)
    for index in indices:
        first = int((room >= lengths[index]).argmax())
        if first == len(batches):
            batches.append([])
        batches[first].append(index)
        room[first] -= lengths[index]
    return batches


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
