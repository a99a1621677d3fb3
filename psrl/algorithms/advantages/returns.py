"""Rewards of tokens, and their discounted sums over the tokens that follow in the same sample."""

from __future__ import annotations

from collections.abc import Callable

import torch

from psrl.algorithms.advantages.base import RewardedBatch, SampleRewards
from psrl.algorithms.tensors import masked


def token_rewards(rewards: SampleRewards, batch: RewardedBatch) -> torch.Tensor:
    """float64 [rows, length]: the outcome at each sample's last trainable token, less the KL penalty of each token."""
    mask, sequences = batch.loss_mask, batch.sequences
    outcome = sequences.spread(rewards.outcome.to(mask.device))
    reward = masked(outcome, _last_tokens(batch))
    return reward if batch.kl_penalty is None else reward - masked(batch.kl_penalty.double(), mask)


def _last_tokens(batch: RewardedBatch) -> torch.Tensor:
    """bool [rows, length]: the last trainable token of each sample."""
    columns = torch.arange(batch.loss_mask.shape[1], device=batch.loss_mask.device).expand(batch.loss_mask.shape)
    last = batch.sequences.spread(batch.sequences.max(columns.double(), batch.loss_mask))
    return batch.loss_mask & (columns == last)


def backward_scan(batch: RewardedBatch, step: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """float64 [rows, length]: a recurrence from the last token of each sample to its first.

    `step(column, following)` gives the values [rows] of a column from those of the next trainable token of the same
    sample (0 after its last one). Tokens that are not trainable (another speaker's) are passed over: the recurrence
    goes on from the token after them.
    """
    mask, ids = batch.loss_mask, batch.sequences.ids
    result = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    following = result.new_zeros(mask.shape[0])
    for column in range(mask.shape[1] - 1, -1, -1):
        if column + 1 < mask.shape[1]:
            following = torch.where(ids[:, column] == ids[:, column + 1], following, 0.0)
        following = torch.where(mask[:, column], step(column, following), following)
        result[:, column] = torch.where(mask[:, column], following, 0.0)
    return result


def returns_to_go(rewards: SampleRewards, batch: RewardedBatch, gamma: float) -> torch.Tensor:
    """float64 [rows, length]: G_t = reward_t + gamma G_t+1 over the trainable tokens of each sample."""
    reward = token_rewards(rewards, batch)
    return backward_scan(batch, lambda column, following: reward[:, column] + gamma * following)
