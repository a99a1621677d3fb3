"""From token losses to one number: `actor.loss_agg_mode`.

Every mode is a weighted sum of token losses over a denominator of the *whole* optimizer step, so the parts of any split
into micro-batches and ranks add up to the same loss and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psrl.algorithms.sequences import Sequences
from psrl.algorithms.tensors import masked

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, slots=True)
class Aggregation:
    """`tokens` and `sequences` are those with a trainable token in the whole optimizer step, over all ranks.

    - token-mean: sum over tokens / tokens (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 12)
    - seq-mean-token-sum: each sequence's sum, / sequences
    - seq-mean-token-mean: each sequence's mean, / sequences (GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3)
    - seq-mean-token-sum-norm: each sequence's sum / `scale`, a constant such as the longest response, / sequences
      (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)
    """

    mode: str = "token-mean"
    tokens: int = 1
    sequences: int = 1
    scale: float = 1.0

    @property
    def denominator(self) -> float:
        """What the numerators of all micro-batches and ranks are divided by; at least 1, so that nothing is 0 / 0."""
        count = self.tokens if self.mode == "token-mean" else self.sequences
        return max(count, 1) * (self.scale if self.mode == "seq-mean-token-sum-norm" else 1.0)

    def numerator(self, token_losses: torch.Tensor, mask: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """This micro-batch's share, a scalar: `token_losses` [rows, length] summed over `mask` with the mode's weights.
        An empty mask gives exactly 0."""
        losses = masked(token_losses, mask)
        if self.mode == "seq-mean-token-mean":
            losses = losses / sequences.spread(sequences.sum(mask).clamp(min=1))
            losses = masked(losses, mask)
        elif self.mode not in LOSS_AGG_MODES:
            raise ValueError(f"loss_agg_mode is {self.mode!r}; it must be one of {', '.join(LOSS_AGG_MODES)}")
        return losses.sum()

    def share(self, mask: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """This micro-batch's part of `denominator`, float64: the parts of all micro-batches and ranks add up to it."""
        if self.mode == "token-mean":
            return mask.sum().double()
        scale = self.scale if self.mode == "seq-mean-token-sum-norm" else 1.0
        return (sequences.sum(mask) > 0).sum().double() * scale
