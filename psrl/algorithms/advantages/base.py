"""What every advantage estimator gets and gives; see `advantages.ESTIMATORS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from psrl.algorithms.metrics import AllSum
from psrl.algorithms.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRewards:
    """Vectors over the samples of the buffer (or chunk) in flat batch order, on the CPU. Only samples whose group this rank
    has read are `valid` here; the others belong to other ranks and play no part in what this rank computes."""

    outcome: torch.Tensor
    """float64 [samples]: the reward of the whole response, shaped; 0 where not valid."""
    valid: torch.Tensor
    """bool [samples]: may be trained."""
    group: torch.Tensor
    """int64 [samples]: position of the sample's group."""
    baseline: torch.Tensor | None = None
    """float64 [samples]: reward of the greedy sample of its group (remax)."""
    kl_penalty: torch.Tensor | None = None
    """float64 [samples]: sum of the KL penalties of its tokens, over all ranks; None: no KL in the reward."""

    @property
    def total(self) -> torch.Tensor:
        """float64 [samples]: outcome less KL penalties."""
        return self.outcome if self.kl_penalty is None else self.outcome - self.kl_penalty


class RewardedBatch(Protocol):
    """What an estimator reads of one of this rank's micro-batches; grids are [rows, length]."""

    @property
    def loss_mask(self) -> torch.Tensor: ...
    @property
    def sequences(self) -> Sequences: ...
    @property
    def kl_penalty(self) -> torch.Tensor | None: ...
    @property
    def values(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOptions:
    """`norm_by_std`: grpo only. `gamma`: discount of later rewards. `lam`: GAE's decay."""

    norm_by_std: bool = True
    gamma: float = 1.0
    lam: float = 1.0


@dataclass(frozen=True, slots=True)
class Advantages:
    """One grid [rows, length] a micro-batch, 0 outside its mask; `returns` are the critic's targets (gae only)."""

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor] | None = None


Estimator = Callable[[SampleRewards, Sequence[RewardedBatch], AdvantageOptions, AllSum], Advantages]
"""Pure apart from `AllSum`, which makes it collective where the estimator normalises over the whole buffer."""


def spread(per_sample: torch.Tensor, batches: Sequence[RewardedBatch]) -> Advantages:
    """One value a sample [samples] for each of its trainable tokens."""
    return Advantages(
        [torch.where(b.loss_mask, b.sequences.spread(per_sample.to(b.loss_mask.device)), 0.0) for b in batches]
    )
