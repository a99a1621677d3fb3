"""CISPO: the importance weight is clipped, never the gradient."""

from __future__ import annotations

import torch

from psrl.algorithms.policy_losses.base import Clip, PolicyTokens, TokenLosses
from psrl.algorithms.tensors import possible


def cispo(tokens: PolicyTokens, clip: Clip) -> TokenLosses:
    """CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4 and 5): loss_t = -sg[clip(r_t, 1 - low, 1 + high)] A_t log p_t.

    Every token keeps a gradient, only its weight is bounded; `low` = 1 leaves it unbounded below, as the paper does.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    losses = -weight * tokens.advantages * possible(tokens.log_probs, tokens.mask)
    return TokenLosses(losses, weight != ratio, torch.zeros_like(tokens.mask))
