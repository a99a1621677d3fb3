"""How far the rollout is from the policy that trains: the metrics under `rollout_corr/`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psrl.algorithms.metrics import MetricSums
from psrl.algorithms.rollout_correction.settings import Correction
from psrl.algorithms.rollout_correction.weights import log_ratios, ratios
from psrl.algorithms.sequences import Sequences
from psrl.algorithms.tensors import LOG_RATIO_LIMIT, masked


def correction_sums(
    train_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    sequences: Sequences,
    *,
    correction: Correction,
    weights: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
) -> MetricSums:
    """Partial results of one micro-batch for `finalise`, float64 scalars; see there for what they become.

    All over `mask`, rejected tokens included. `weights` are those that multiply the loss (None: no weight is applied and
    the ratio itself is described); `accepted` are the tokens that rejection kept (None: all).
    """
    log_rho = log_ratios(train_log_probs, rollout_log_probs, mask)
    rho = log_rho.exp()
    ratio = ratios(log_rho, sequences, correction.level)
    applied = ratio if weights is None else weights.detach().double()
    infinity = applied.new_tensor(float("inf"))
    low = 1.0 / correction.high if correction.low is None else correction.low
    return {
        "tokens": mask.sum(),
        "weight": masked(applied, mask).sum(),
        "weight_sq": masked(applied.square(), mask).sum(),
        "weight_min": torch.where(mask, applied, infinity).amin(),
        "weight_max": torch.where(mask, applied, -infinity).amax(),
        "high": (mask & (ratio > correction.high)).sum(),
        "low": (mask & (ratio < low)).sum(),
        "rejected": mask.new_zeros((), dtype=torch.int64) if accepted is None else (mask & ~accepted).sum(),
        "kl": -log_rho.sum(),
        "k3": (torch.expm1(log_rho) - log_rho).sum(),
        "rho_sq": masked(rho.square(), mask).sum(),
        **_sequence_sums(train_log_probs.detach().double(), rollout_log_probs.double(), log_rho, mask, sequences),
    }


def _sequence_sums(
    train: torch.Tensor, rollout: torch.Tensor, log_rho: torch.Tensor, mask: torch.Tensor, sequences: Sequences
) -> MetricSums:
    """Samples without a token in `mask` do not count. Exponents are clamped to +-20, so that nothing is infinite."""
    lengths = sequences.sum(mask)
    present = lengths > 0
    product = sequences.sum(log_rho).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def perplexity(token_nll: torch.Tensor) -> torch.Tensor:
        mean = sequences.sum(masked(token_nll, mask)) / lengths.clamp(min=1)
        return masked(mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), present).sum()

    return {
        "sequences": present.sum(),
        "sequence_rho_sq": masked((2.0 * product).exp(), present).sum(),
        "ppl_ratio": perplexity(-log_rho),
        "training_ppl": perplexity(-train),
        "rollout_ppl": perplexity(-rollout),
    }


def finalise(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of one optimizer step (or more) from the combined partial results; {} if no token was trained.

    Over tokens: rollout_is_mean, _std (population), _min, _max of the weights that multiply the loss;
    rollout_is_eff_sample_size = (sum w)^2 / (n sum w^2), in (0, 1], 1 when all weights are equal;
    ratio_fraction_high / _low: share whose ratio (at level "sequence" the product over its sequence) is above the upper
    threshold / below the lower one, or below 1 / the upper one if there is no lower; kl = E[log p_rollout - log p_train] and
    k3_kl = E[rho - 1 - log rho], two estimates of KL(rollout || train) (Schulman 2020, "Approximating KL divergence");
    chi2_token = E[rho^2] - 1; rs_masked_fraction: share of tokens that rejection removed.
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
        "rs_masked_fraction": sums["rejected"] / tokens,
        "kl": sums["kl"] / tokens,
        "k3_kl": sums["k3"] / tokens,
        "chi2_token": sums["rho_sq"] / tokens - 1.0,
        "chi2_seq": sums["sequence_rho_sq"] / sequences - 1.0,
        "ppl_ratio": sums["ppl_ratio"] / sequences,
        "training_ppl": sums["training_ppl"] / sequences,
        "rollout_ppl": sums["rollout_ppl"] / sequences,
    }
