"""Statistics within groups, on vectors over samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psrl.algorithms.advantages.base import SampleRewards


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """All float64 [samples], each sample's value that of its group's valid samples; 0 where not `usable`.

    `usable`: valid, at least two valid samples in the group, and not all rewards equal. Where rewards are equal the
    advantages must be exactly 0, whatever rounding does to a mean.
    """

    count: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    usable: torch.Tensor


def group_statistics(rewards: SampleRewards) -> GroupStatistics:
    """Mean and standard deviation (n - 1 in the denominator) of the total rewards in each sample's group."""
    values, valid, group = torch.where(rewards.valid, rewards.total, 0.0), rewards.valid, rewards.group
    groups = int(group.max()) + 1 if group.numel() else 0

    def add(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(groups).index_add(0, group, x)[group]

    def extreme(kind: str, outside: float) -> torch.Tensor:
        x = torch.where(valid, values, outside)
        return x.new_full((groups,), outside).scatter_reduce(0, group, x, kind)[group]

    count = add(valid.double())
    mean = add(values) / count.clamp(min=1)
    squares = torch.where(valid, (values - mean).square(), 0.0)
    std = (add(squares) / (count - 1).clamp(min=1)).sqrt()
    usable = valid & (count >= 2) & (extreme("amin", torch.inf) < extreme("amax", -torch.inf))
    return GroupStatistics(count, mean, std, usable)
