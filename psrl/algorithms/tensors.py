"""Masking and log-ratios that stay finite whatever lies outside the mask."""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is already far outside every clip range, and never overflows."""


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where `mask`, else exactly 0 in value and gradient, also where `values` is NaN or infinite."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def possible(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`log_probs` where `mask` and not -inf, else 0: what is impossible has no gradient, and no inf - inf = NaN follows."""
    return masked(log_probs, mask & ~torch.isneginf(log_probs))


def clamped_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """numerator - denominator (both log-probs) clamped to +-20, exactly 0 outside `mask`. A numerator of -inf gives -20, a
    denominator of -inf 20, both of them 0, all with gradient 0."""
    both_impossible = torch.isneginf(numerator) & torch.isneginf(denominator)
    return masked(numerator - denominator, mask & ~both_impossible).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
