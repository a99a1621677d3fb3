"""Group Sequence Policy Optimization: one ratio a sequence."""

from __future__ import annotations

from psrl.algorithms.policy_losses.base import Clip, PolicyTokens, TokenLosses
from psrl.algorithms.policy_losses.vanilla import clipped_surrogate
from psrl.algorithms.tensors import possible


def gspo(tokens: PolicyTokens, clip: Clip) -> TokenLosses:
    """GSPO-token (Zheng et al. 2025, arXiv:2507.18071, eq. 13 and 14): PPO's clip on s = exp(mean over the sequence of
    log r_t), the geometric mean of its token ratios.

    Each token's loss has the value of its sequence's and the gradient of its own log-prob times s:
    s_t = sg[s] exp(log p_t - sg[log p_t]). With one advantage a sequence and `seq-mean-token-mean` this is GSPO itself. The
    ratio hardly differs from 1, so clip ranges are of the order of 3e-4.
    """
    sequences, log_ratio = tokens.sequences, tokens.log_ratio.detach()
    lengths = sequences.sum(tokens.mask).clamp(min=1)
    mean = sequences.spread(sequences.sum(log_ratio) / lengths)
    own = possible(tokens.log_probs, tokens.mask)
    straight_through = own - own.detach()
    return clipped_surrogate((mean + straight_through).exp(), tokens.advantages, clip)
