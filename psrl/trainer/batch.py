"""From sealed groups (bytes) to the padded tensors of one rank's micro-batches, without a loop over tokens."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from psrl.algorithms.advantages import SampleRewards
from psrl.algorithms.rewards import GroupRewards, group_rewards
from psrl.algorithms.sequences import Sequences
from psrl.protocol.samples import Group, Sample
from psrl.trainer.backends.base import MicroBatch, SharedLayout
from psrl.trainer.rows import Row

log = logging.getLogger("psrl.trainer")

DUMMY_LENGTH = 2
"""Columns of a dummy micro-batch: the shortest row that has a token to predict."""


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """Where sample i of the flat batch order lies: sample `sample[i]` of group `group[i]`."""

    group: list[int]
    sample: list[int]


def index_samples(tokens: Sequence[Sequence[int]]) -> SampleIndex:
    """Flat batch order of these groups: `index_samples([[5, 6], [7]])` has group [0, 0, 1] and sample [0, 1, 0]."""
    return SampleIndex(
        group=[group for group, sizes in enumerate(tokens) for _ in sizes],
        sample=[sample for sizes in tokens for sample in range(len(sizes))],
    )


def groups_needed(rank_rows: Sequence[Sequence[Row]], index: SampleIndex) -> list[int]:
    """Groups that a rank must read: those with a row in one of its micro-batches, in batch order."""
    return sorted({index.group[row.samples[0]] for batch in rank_rows for row in batch})


def rewards_of(
    group: Group, tokens: Sequence[int], least_valid: int, shape: Callable[[int], float] | None = None
) -> GroupRewards:
    """What the samples of a group have earned. A sample with `tokens` 0 (see SampleRef.tokens) counts as one without a
    reward, so that what is trained follows from the references alone, equally on every rank. `shape(response tokens)` is
    added to each reward."""
    given = [sample.reward if size > 0 else None for sample, size in zip(group.samples, tokens, strict=True)]
    result = group_rewards(given, least_valid)
    added = np.array([shape(len(s.response_ids) // 4) if shape else 0.0 for s in group.samples], dtype=np.float64)
    greedy = [
        s.reward + more
        for s, more in zip(group.samples, added, strict=True)
        if s.greedy and s.reward is not None and math.isfinite(s.reward)
    ]
    return dataclasses.replace(
        result, rewards=np.where(result.valid, result.rewards + added, 0.0), baseline=greedy[0] if greedy else None
    )


def sample_rewards(index: SampleIndex, rewards: Mapping[int, GroupRewards]) -> SampleRewards:
    """Vectors over all samples of the batch; those of groups that are not in `rewards` are not valid."""
    outcome, valid = np.zeros(len(index.group)), np.zeros(len(index.group), dtype=np.bool_)
    baseline = np.zeros(len(index.group))
    for i, (group, sample) in enumerate(zip(index.group, index.sample, strict=True)):
        if group in rewards:
            outcome[i], valid[i] = rewards[group].rewards[sample], rewards[group].valid[sample]
            baseline[i] = rewards[group].baseline or 0.0
    compared = bool(rewards) and all(group.baseline is not None for group in rewards.values())
    return SampleRewards(
        outcome=torch.from_numpy(outcome),
        valid=torch.from_numpy(valid),
        group=torch.tensor(index.group, dtype=torch.int64),
        baseline=torch.from_numpy(baseline) if compared or not rewards else None,
    )


def build_micro_batches(
    rank_rows: Sequence[Sequence[Row]],
    index: SampleIndex,
    groups: Mapping[int, Group],
    rewards: Mapping[int, GroupRewards],
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """One rank's micro-batches, advantages still 0. `groups` and `rewards` are by position in the batch and hold
    `groups_needed`; a sample that is not valid is not trained.

    Rows are right-padded with token 0. A token whose engine calls it impossible (log-prob -inf, as of a distribution that was cut
    to the likeliest tokens) is not trained, with a warning. Raises ValueError, naming the group and sample, when a sample's
    arrays differ in length or a trainable token has another log-prob that is not finite.
    """
    count = len(index.group)
    return [_build(batch, index, groups, rewards, device) if batch else _dummy(count, device) for batch in rank_rows]


def count_loss_tokens(batches: Sequence[MicroBatch]) -> int:
    """Tokens of these micro-batches whose loss counts; added over ranks a denominator of the loss."""
    return sum(int(batch.trained.sum()) for batch in batches)


def count_loss_sequences(batches: Sequence[MicroBatch]) -> int:
    """Samples of these micro-batches with such a token; added over ranks the other denominator."""
    return sum(int((batch.sequences.sum(batch.trained) > 0).sum()) for batch in batches)


def _build(
    batch: Sequence[Row],
    index: SampleIndex,
    groups: Mapping[int, Group],
    rewards: Mapping[int, GroupRewards],
    device: torch.device | str,
) -> MicroBatch:
    """Write row after row into flat arrays, then place them into the padded grid by one boolean index."""
    rows = [_Row.of(row, index, groups, rewards) for row in batch]
    real = np.arange(max(row.length for row in rows)) < np.array([row.length for row in rows])[:, None]

    def grid(parts: Sequence[np.ndarray], fill: float, dtype: type) -> torch.Tensor:
        out: np.ndarray = np.full(real.shape, fill, dtype=dtype)
        out[real] = np.concatenate(parts)
        return _placed(torch.from_numpy(out), device)

    layout = None
    if any(len(row.row.samples) > 1 for row in rows):
        layout = SharedLayout(
            positions=grid([row.positions for row in rows], 0, np.int64),
            segments=grid([row.segments for row in rows], -1, np.int64),
            predictors=grid([row.predictors for row in rows], 0, np.int64),
        )
    return MicroBatch(
        input_ids=grid([row.tokens for row in rows], 0, np.int64),
        attention_mask=_placed(torch.from_numpy(real), device),
        loss_mask=grid([row.loss_mask for row in rows], False, np.bool_),
        advantages=torch.zeros(real.shape, device=device),
        rollout_log_probs=grid([row.log_probs for row in rows], 0.0, np.float32),
        sequences=Sequences(grid([row.sequences for row in rows], -1, np.int64), len(index.group)),
        layout=layout,
    )


def _placed(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """On the device; a GPU fetches it from pinned memory while this process goes on to the next one."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(slots=True)
class _Row:
    """One row's arrays, prompt first; all of `length` elements."""

    row: Row
    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    predictors: np.ndarray
    loss_mask: np.ndarray
    log_probs: np.ndarray
    sequences: np.ndarray

    @property
    def length(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, row: Row, index: SampleIndex, groups: Mapping[int, Group], rewards: Mapping[int, GroupRewards]) -> _Row:
        position = index.group[row.samples[0]]
        group, valid = groups[position], rewards[position].valid
        prompt = np.frombuffer(group.prompt_ids, dtype="<i4")
        numbers = [index.sample[i] for i in row.samples]
        samples = [group.samples[s] for s in numbers]
        sizes = [_response_length(group, s) for s in numbers]
        p, total = len(prompt), sum(sizes)

        segments = np.concatenate([np.zeros(p, np.int64), np.repeat(np.arange(1, len(sizes) + 1), sizes)])
        starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)  # where each response token's own response begins
        inside = np.arange(total) - starts
        predictors = np.concatenate([np.arange(p) - 1, np.where(inside == 0, p - 1, p + np.arange(total) - 1)])
        mask = np.frombuffer(b"".join(_mask_bytes(s) for s in samples), dtype=np.uint8) != 0
        log_probs = np.frombuffer(b"".join(s.logprobs for s in samples), dtype="<f4")
        mask = _possible(mask & np.repeat(valid[numbers], sizes), log_probs, np.repeat(numbers, sizes), group)
        loss_mask = np.concatenate([np.zeros(p, np.bool_), mask])
        if p == 0:
            loss_mask[: min(1, total)] = False  # nothing predicts the first token of a row
        zeros = np.zeros(p, np.float32)
        return cls(
            row=row,
            tokens=np.concatenate([prompt, np.frombuffer(b"".join(s.response_ids for s in samples), dtype="<i4")]),
            positions=np.concatenate([np.arange(p), p + inside]),
            segments=segments,
            predictors=predictors,
            loss_mask=loss_mask,
            log_probs=np.concatenate([zeros, np.where(mask, log_probs, 0.0)]),
            sequences=np.concatenate([np.full(p, -1), np.repeat(np.array(row.samples), sizes)]),
        )


def _possible(mask: np.ndarray, log_probs: np.ndarray, sample: np.ndarray, group: Group) -> np.ndarray:
    """`mask` without tokens whose log-prob is -inf; `sample` is each token's position in its group."""
    odd = mask & ~np.isfinite(log_probs)
    if not odd.any():
        return mask
    broken = sample[odd & ~np.isneginf(log_probs)]
    if len(broken):
        raise ValueError(
            f"sample {broken[0]} of group {group.group} has a log-prob that is not finite: its engine is at fault"
        )
    for position, count in zip(*np.unique(sample[odd], return_counts=True), strict=True):
        log.warning(
            "sample %d of group %d: its engine calls %d of its tokens impossible (log-prob -inf): they are not trained",
            *(position, group.group, count),
        )
    return mask & ~odd


def _response_length(group: Group, position: int) -> int:
    sample = group.samples[position]
    num_tokens, num_log_probs = len(sample.response_ids) // 4, len(sample.logprobs) // 4
    if num_log_probs != num_tokens or len(sample.mask) not in (0, num_tokens):
        raise ValueError(
            f"sample {position} of group {group.group} has {num_tokens} response tokens, {num_log_probs} log-probs and"
            f" a mask of {len(sample.mask)}; they must be of one length (the mask may be empty)"
        )
    return num_tokens


def _mask_bytes(sample: Sample) -> bytes:
    return sample.mask or b"\x01" * (len(sample.response_ids) // 4)


def _dummy(count: int, device: torch.device | str) -> MicroBatch:
    shape = (1, DUMMY_LENGTH)
    return MicroBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64, device=device),
        attention_mask=torch.ones(shape, dtype=torch.bool, device=device),
        loss_mask=torch.zeros(shape, dtype=torch.bool, device=device),
        advantages=torch.zeros(shape, device=device),
        rollout_log_probs=torch.zeros(shape, device=device),
        sequences=Sequences(torch.full(shape, -1, device=device), count),
    )
