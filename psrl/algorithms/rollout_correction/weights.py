"""Importance weights: how much a token of another policy counts for the one that trains."""

from __future__ import annotations

import torch

from psrl.algorithms.rollout_correction.settings import Correction
from psrl.algorithms.sequences import Sequences
from psrl.algorithms.tensors import LOG_RATIO_LIMIT, clamped_log_ratio, masked


def log_ratios(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log rho = log p_train - log p_rollout clamped to +-20, float64 [rows, length], 0 outside `mask`; no gradient."""
    return clamped_log_ratio(train_log_probs.detach().double(), rollout_log_probs.double(), mask)


def ratios(log_rho: torch.Tensor, sequences: Sequences, level: str | None) -> torch.Tensor:
    """What a weight is made of at each token [rows, length]: its own rho, or with level "sequence" the product over its
    sequence (again within e^+-20)."""
    if level == "sequence":
        log_rho = sequences.spread(sequences.sum(log_rho).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return log_rho.exp()


def importance_weights(
    log_rho: torch.Tensor, mask: torch.Tensor, sequences: Sequences, correction: Correction
) -> torch.Tensor:
    """Weights [rows, length], 0 outside `mask`, before any normalisation.

    With one threshold C: w = min(rho, C), which bounds the variance at the price of a bias towards the sampling policy
    (truncated importance sampling, Ionides 2008; per token in RL with a separate rollout engine, Yao et al. 2025). With a
    band: w = rho inside [low, high] and 0 outside (IcePop, Ling team 2025, arXiv:2510.18855).
    """
    rho = ratios(log_rho, sequences, correction.level)
    if correction.low is None:
        return masked(rho.clamp(max=correction.high), mask)
    return masked(rho, mask & (rho >= correction.low) & (rho <= correction.high))


def weight_sums(
    weights: torch.Tensor, mask: torch.Tensor, sequences: Sequences, level: str | None
) -> tuple[float, float]:
    """(sum of the weights, how many) over the units of `level`, tokens or sequences: their mean normalises a batch."""
    if level == "sequence":
        lengths = sequences.sum(mask)
        means = sequences.sum(masked(weights, mask)) / lengths.clamp(min=1)
        return float(means.sum()), float((lengths > 0).sum())
    return float(masked(weights, mask).sum()), float(mask.sum())
