"""Policy losses: tensors in, un-normalised token sums and a scalar out. Nothing here knows about batches or ranks."""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is already far outside every clip range, and never overflows."""


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where `mask`, else exactly 0 in value and gradient, also where `values` is NaN or infinite."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def ppo_clip_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    global_tokens: int,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) as a mean over all tokens of the batch.

    loss = 1/N sum_t w_t max(-A_t r_t, -A_t clip(r_t, 1 - clip_low, 1 + clip_high)), r = exp(log_probs - old_log_probs).

    All tensors are [rows, length]; `mask` is bool and selects the tokens of the sum. `global_tokens` is N: the
    trainable tokens of the whole optimizer step, over all micro-batches and ranks, so the result does not depend on
    how the batch was split. `old_log_probs=None` says that this is the only update with these weights: r is exactly
    1, its gradient that of log_probs. `weights` are importance weights without gradient (None: all 1).

    A batch whose mask is all False gives exactly 0, with zero gradients. Returns the scalar and the un-normalised
    sums `tokens`, `loss`, `clipped` (tokens at which the clip took the gradient away) and `kl` (old - new).
    """
    reference = log_probs.detach() if old_log_probs is None else old_log_probs
    log_ratio = masked(log_probs - reference, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    gain = masked(advantages, mask)
    unclipped = -gain * ratio
    clipped = -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = torch.maximum(unclipped, clipped)
    if weights is not None:
        token_loss = token_loss * masked(weights, mask)
    token_loss = masked(token_loss, mask)
    total = token_loss.sum()
    sums = {
        "tokens": mask.sum(),
        "loss": total.detach(),
        "clipped": masked((clipped > unclipped).double().detach(), mask).sum(),
        "kl": -log_ratio.detach().double().sum(),
    }
    return total / max(global_tokens, 1), sums
