"""ReMax: the greedy answer is the baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.algorithms.advantages.base import AdvantageOptions, Advantages, RewardedBatch, SampleRewards
from psrl.algorithms.advantages.returns import returns_to_go
from psrl.algorithms.metrics import AllSum


def remax(
    rewards: SampleRewards, batches: Sequence[RewardedBatch], options: AdvantageOptions, all_sum: AllSum
) -> Advantages:
    """A_t = G_t - r(greedy response to the same prompt) (Li et al. 2023, arXiv:2310.10505, algorithm 2), G_t the reward from
    token t on without discount, KL penalties included. Raises ValueError when there is no greedy sample."""
    if rewards.baseline is None:
        raise ValueError("remax needs the reward of a greedy sample in every group")
    grids = []
    for batch in batches:
        baseline = batch.sequences.spread(rewards.baseline.to(batch.loss_mask.device))
        grids.append(torch.where(batch.loss_mask, returns_to_go(rewards, batch, gamma=1.0) - baseline, 0.0))
    return Advantages(grids)
