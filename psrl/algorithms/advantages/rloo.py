"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.algorithms.advantages.base import AdvantageOptions, Advantages, RewardedBatch, SampleRewards, spread
from psrl.algorithms.advantages.groups import group_statistics
from psrl.algorithms.metrics import AllSum


def rloo(
    rewards: SampleRewards, batches: Sequence[RewardedBatch], options: AdvantageOptions, all_sum: AllSum
) -> Advantages:
    """A_i = r_i - mean of the other samples of its prompt (Ahmadian et al. 2024, arXiv:2402.14740, section 3.2; Kool et al.
    2019), which equals (r_i - mean(r)) n / (n - 1). The baseline does not depend on sample i, so nothing is biased."""
    group = group_statistics(rewards)
    advantages = (rewards.total - group.mean) * group.count / (group.count - 1).clamp(min=1)
    return spread(torch.where(group.usable, advantages, 0.0), batches)
