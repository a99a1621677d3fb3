"""From sealed groups (bytes) to the padded tensors of one rank's micro-batches, without a loop over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from psrl.algorithms.advantages import GroupAdvantages, grpo_advantages
from psrl.protocol.samples import Group, Sample
from psrl.trainer.backends.base import MicroBatch

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


def groups_needed(rank_plan: Sequence[Sequence[int]], index: SampleIndex) -> list[int]:
    """Groups that a rank must read: those with a sample in one of its micro-batches, in batch order."""
    return sorted({index.group[i] for batch in rank_plan for i in batch})


def group_advantages(group: Group, tokens: Sequence[int], norm_by_std: bool) -> GroupAdvantages:
    """GRPO advantages of a group. A sample with `tokens` 0 (see SampleRef.tokens) counts as one without a reward, so
    that what is trained follows from the references alone, equally on every rank."""
    rewards = [sample.reward if size > 0 else None for sample, size in zip(group.samples, tokens, strict=True)]
    return grpo_advantages(rewards, norm_by_std)


def build_micro_batches(
    rank_plan: Sequence[Sequence[int]],
    index: SampleIndex,
    groups: Mapping[int, Group],
    advantages: Mapping[int, GroupAdvantages],
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """One rank's micro-batches. `groups` and `advantages` are by position in the batch and hold `groups_needed`.

    Rows are right-padded with token 0. Raises ValueError, naming the group and sample, when a sample's arrays differ in
    length or a trainable token has a log-prob that is not finite.
    """
    prompts = {position: np.frombuffer(group.prompt_ids, dtype="<i4") for position, group in groups.items()}
    return [_build(batch, index, groups, prompts, advantages, device) for batch in rank_plan]


def count_loss_tokens(batches: Sequence[MicroBatch]) -> int:
    """Trainable tokens of these micro-batches; added over ranks it is the denominator of the loss."""
    return sum(int(batch.loss_mask.sum()) for batch in batches)


def _build(
    batch: Sequence[int],
    index: SampleIndex,
    groups: Mapping[int, Group],
    prompts: Mapping[int, np.ndarray],
    advantages: Mapping[int, GroupAdvantages],
    device: torch.device | str,
) -> MicroBatch:
    if not batch:
        return _dummy(device)
    positions = [(index.group[i], index.sample[i]) for i in batch]
    samples = [groups[g].samples[s] for g, s in positions]
    responses = np.array([_response_length(groups[g], s) for g, s in positions])
    starts = np.array([len(prompts[g]) for g, _ in positions])
    ends = starts + responses
    column = np.arange(int(ends.max()))
    token = column < ends[:, None]
    response = token & (column >= starts[:, None])

    input_ids = np.zeros(token.shape, dtype=np.int64)
    input_ids[token] = np.frombuffer(
        b"".join(part for (g, _), sample in zip(positions, samples, strict=True)
                 for part in (groups[g].prompt_ids, sample.response_ids)),
        dtype="<i4",
    )  # fmt: skip
    loss_mask = np.zeros(token.shape, dtype=np.bool_)
    loss_mask[response] = np.frombuffer(b"".join(_mask_bytes(s) for s in samples), dtype=np.uint8) != 0
    loss_mask[:, 0] = False  # nothing predicts the first token of a row (an empty prompt's first response token)
    log_probs = np.zeros(token.shape, dtype=np.float32)
    log_probs[response] = np.frombuffer(b"".join(s.logprobs for s in samples), dtype="<f4")
    log_probs[~loss_mask] = 0.0
    if not np.isfinite(log_probs).all():
        g, s = positions[int(np.argmin(np.isfinite(log_probs).all(axis=1)))]
        raise ValueError(f"sample {s} of group {groups[g].group} has a log-prob that is not finite")
    row_advantages = np.array([advantages[g].advantages[s] for g, s in positions], dtype=np.float32)
    valid = np.array([advantages[g].valid[s] for g, s in positions])
    loss_mask &= valid[:, None]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        attention_mask=torch.from_numpy(token).to(device),
        loss_mask=torch.from_numpy(loss_mask).to(device),
        advantages=torch.from_numpy(np.where(loss_mask, row_advantages[:, None], np.float32(0.0))).to(device),
        rollout_log_probs=torch.from_numpy(log_probs).to(device),
    )


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


def _dummy(device: torch.device | str) -> MicroBatch:
    shape = (1, DUMMY_LENGTH)
    return MicroBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64, device=device),
        attention_mask=torch.ones(shape, dtype=torch.bool, device=device),
        loss_mask=torch.zeros(shape, dtype=torch.bool, device=device),
        advantages=torch.zeros(shape, device=device),
        rollout_log_probs=torch.zeros(shape, device=device),
    )
