"""REINFORCE++: no critic and no group, one normalisation over the whole buffer."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.algorithms.advantages.base import AdvantageOptions, Advantages, RewardedBatch, SampleRewards
from psrl.algorithms.advantages.returns import returns_to_go
from psrl.algorithms.advantages.whitening import whiten
from psrl.algorithms.metrics import AllSum


def reinforce_plus_plus(
    rewards: SampleRewards, batches: Sequence[RewardedBatch], options: AdvantageOptions, all_sum: AllSum
) -> Advantages:
    """A_t = (G_t - mean) / std with G_t the (discounted) reward from token t on, KL penalties included, and mean and std
    over all trainable tokens of the buffer (Hu 2025, arXiv:2501.03262, section 3). Works with one sample a prompt."""
    return Advantages(whiten([returns_to_go(rewards, b, options.gamma) for b in batches], batches, all_sum))
