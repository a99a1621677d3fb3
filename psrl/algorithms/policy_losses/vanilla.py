"""Clipped surrogate of PPO, with separate ranges up and down and a bound on negative advantages."""

from __future__ import annotations

import torch

from psrl.algorithms.policy_losses.base import Clip, PolicyTokens, TokenLosses


def vanilla(tokens: PolicyTokens, clip: Clip) -> TokenLosses:
    """PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with a ratio for each token.

    loss_t = max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high)), r = exp(log_probs - old log-probs). With a dual clip c > 1
    (Ye et al. 2020, arXiv:1912.09729, eq. 5) no more than -A_t c where A_t < 0: a token that the policy has made much more
    likely although it is bad cannot dominate the step.
    """
    return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, clip)


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> TokenLosses:
    """PPO's token losses for any kind of ratio [rows, length]."""
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    losses = torch.maximum(plain, limited)
    clipped = limited > plain
    bounded = torch.zeros_like(clipped)
    if clip.dual is not None:
        bound = -advantages * clip.dual
        bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(bounded, bound, losses)
    return TokenLosses(losses, clipped, bounded)
