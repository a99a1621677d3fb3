"""REINFORCE: no ratio and no clip; where the data comes from another policy, importance weights say so from outside."""

from __future__ import annotations

import torch

from psrl.algorithms.policy_losses.base import Clip, PolicyTokens, TokenLosses
from psrl.algorithms.tensors import possible


def reinforce(tokens: PolicyTokens, _clip: Clip) -> TokenLosses:
    """loss_t = -A_t log p_t (Williams 1992). A token that the policy holds impossible has no gradient."""
    nothing = torch.zeros_like(tokens.mask)
    return TokenLosses(-tokens.advantages * possible(tokens.log_probs, tokens.mask), nothing, nothing)
