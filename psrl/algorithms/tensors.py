"""Masking and log-ratios that stay finite whatever lies outside the mask."""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is already far outside every clip range, and never overflows."""


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where `mask`, else exactly 0 in value and gradient, also where `values` is NaN or infinite."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def clamped_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """numerator - denominator (both log-probs) clamped to +-20, exactly 0 outside `mask`. A log-prob of -inf gives -20
    with gradient 0."""
    return masked(numerator - denominator, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
