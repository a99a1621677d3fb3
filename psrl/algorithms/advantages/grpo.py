"""Group relative advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.algorithms.advantages.base import AdvantageOptions, Advantages, RewardedBatch, SampleRewards, spread
from psrl.algorithms.advantages.groups import group_statistics
from psrl.algorithms.metrics import AllSum

STD_EPS = 1e-6
"""Added to the standard deviation, so that nearly equal rewards give large but finite advantages."""


def grpo(
    rewards: SampleRewards, batches: Sequence[RewardedBatch], options: AdvantageOptions, all_sum: AllSum
) -> Advantages:
    """Each sample relative to the others of its prompt (GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 4).

    A_i = (r_i - mean(r)) / (std(r) + 1e-6) over the group's valid samples, std with n - 1 in the denominator; with
    `norm_by_std=False` A_i = r_i - mean(r) (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). The value holds for every
    trainable token of sample i. Equal rewards give exactly 0.
    """
    group = group_statistics(rewards)
    centred = rewards.total - group.mean
    advantages = centred / (group.std + STD_EPS) if options.norm_by_std else centred
    return spread(torch.where(group.usable, advantages, 0.0), batches)
