"""Correction for samples that another policy than the trained one has drawn: older weights, another engine's kernels.

rho_t = p_train(token t) / p_rollout(token t) is the per-token ratio of the weights that train to those that sampled.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psrl.algorithms.losses import LOG_RATIO_LIMIT, masked
from psrl.algorithms.metrics import MetricSums


def log_ratios(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log rho clamped to +-20, float [rows, length], exactly 0 outside `mask`; no gradient."""
    return masked(train_log_probs - rollout_log_probs, mask).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_tis_weights(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Truncated importance weights of each token: w = min(rho, threshold), detached, [rows, length], 0 outside `mask`.

    Truncation bounds the variance at the price of a bias towards the sampling policy (Ionides 2008, "Truncated
    Importance Sampling"; applied per token to RL with a separate rollout engine by Yao et al. 2025).
    """
    return masked(log_ratios(train_log_probs, rollout_log_probs, mask).exp().clamp(max=threshold), mask)


def correction_sums(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    threshold: float,
    weights: torch.Tensor | None,
) -> MetricSums:
    """Partial results of one micro-batch for `finalise`, float64 scalars; see there for what they become.

    A row is one sequence; rows without a token in `mask` do not count. `weights` are those that multiply the loss
    (None: no correction is applied and rho itself is described).
    """
    log_rho = log_ratios(train_log_probs, rollout_log_probs, mask).double()
    rho = log_rho.exp()
    applied = rho if weights is None else weights.detach().double()
    infinity = applied.new_tensor(float("inf"))
    tokens_per_row = mask.sum(-1)
    rows = tokens_per_row > 0
    length = tokens_per_row.clamp(min=1)
    train_nll = -masked(train_log_probs.detach().double(), mask).sum(-1) / length
    rollout_nll = -masked(rollout_log_probs.double(), mask).sum(-1) / length
    sequence_log_rho = log_rho.sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "tokens": tokens_per_row.sum(),
        "sequences": rows.sum(),
        "weight": masked(applied, mask).sum(),
        "weight_sq": masked(applied.square(), mask).sum(),
        "weight_min": torch.where(mask, applied, infinity).amin(),
        "weight_max": torch.where(mask, applied, -infinity).amax(),
        "high": (mask & (rho > threshold)).sum(),
        "low": (mask & (rho < 1.0 / threshold)).sum(),
        "kl": -log_rho.sum(),
        "k3": (torch.expm1(log_rho) - log_rho).sum(),
        "rho_sq": masked(rho.square(), mask).sum(),
        "sequence_rho_sq": masked((2.0 * sequence_log_rho).exp(), rows).sum(),
        "ppl_ratio": masked((train_nll - rollout_nll).exp(), rows).sum(),
        "training_ppl": masked(train_nll.exp(), rows).sum(),
        "rollout_ppl": masked(rollout_nll.exp(), rows).sum(),
    }


def finalise(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of one optimizer step (or more) from the combined partial results; {} if no token was trained.

    Over tokens: rollout_is_mean, _std (population), _min, _max of the weights that multiply the loss;
    rollout_is_eff_sample_size = (sum w)^2 / (n sum w^2), in (0, 1], 1 when all weights are equal;
    ratio_fraction_high / _low: share with rho > C / rho < 1/C; kl = E[log p_rollout - log p_train] and
    k3_kl = E[rho - 1 - log rho], two estimates of KL(rollout || train) (Schulman 2020, "Approximating KL divergence");
    chi2_token = E[rho^2] - 1. rs_masked_fraction: share of tokens that rejection sampling removed (0: none is set).
    Over sequences: chi2_seq = E[(prod_t rho_t)^2] - 1; training_ppl and rollout_ppl: mean of exp(-mean log p);
    ppl_ratio: mean of each sequence's training over rollout perplexity.
    """
    tokens, sequences = sums["tokens"], sums["sequences"]
    if tokens == 0:
        return {}
    mean, mean_sq = sums["weight"] / tokens, sums["weight_sq"] / tokens
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": max(mean_sq - mean * mean, 0.0) ** 0.5,
        "rollout_is_min": sums["weight_min"],
        "rollout_is_max": sums["weight_max"],
        "rollout_is_eff_sample_size": mean * mean / mean_sq if mean_sq > 0 else 0.0,
        "ratio_fraction_high": sums["high"] / tokens,
        "ratio_fraction_low": sums["low"] / tokens,
        "rs_masked_fraction": 0.0,
        "kl": sums["kl"] / tokens,
        "k3_kl": sums["k3"] / tokens,
        "chi2_token": sums["rho_sq"] / tokens - 1.0,
        "chi2_seq": sums["sequence_rho_sq"] / sequences - 1.0,
        "ppl_ratio": sums["ppl_ratio"] / sequences,
        "training_ppl": sums["training_ppl"] / sequences,
        "rollout_ppl": sums["rollout_ppl"] / sequences,
    }
