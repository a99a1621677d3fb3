"""Generalised advantage estimation from a critic's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.algorithms.advantages.base import AdvantageOptions, Advantages, RewardedBatch, SampleRewards
from psrl.algorithms.advantages.returns import at_next_token, discounted_sums, token_rewards
from psrl.algorithms.advantages.whitening import whiten
from psrl.algorithms.metrics import AllSum
from psrl.algorithms.tensors import masked


def gae(
    rewards: SampleRewards, batches: Sequence[RewardedBatch], options: AdvantageOptions, all_sum: AllSum
) -> Advantages:
    """A_t = delta_t + gamma lam A_t+1, delta_t = reward_t + gamma V_t+1 - V_t, with V = A = 0 after the last token (Schulman
    et al. 2016, arXiv:1506.02438, eq. 16), over the trainable tokens of each sample; tokens of other speakers between them
    are passed over. `values[:, t]` is V before token t is written.

    Advantages are whitened over the buffer; `returns`, the critic's targets, are A + V before that. Raises ValueError when
    a micro-batch has no values.
    """
    raw = [_one_batch(rewards, batch, options) for batch in batches]
    returns = [masked(grid + _values(batch), batch.loss_mask) for grid, batch in zip(raw, batches, strict=True)]
    return Advantages(whiten(raw, batches, all_sum), returns)


def _one_batch(rewards: SampleRewards, batch: RewardedBatch, options: AdvantageOptions) -> torch.Tensor:
    values = _values(batch)
    delta = token_rewards(rewards, batch) + options.gamma * at_next_token(batch, values) - values
    return discounted_sums(batch, delta, options.gamma * options.lam)


def _values(batch: RewardedBatch) -> torch.Tensor:
    if batch.values is None:
        raise ValueError("gae needs the critic's values in every micro-batch")
    return masked(batch.values.double(), batch.loss_mask)
