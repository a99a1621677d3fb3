"""Rejection sampling: which tokens are too far from the policy that trains to be learned from at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.algorithms.rollout_correction.settings import Rule
from psrl.algorithms.sequences import Sequences


def accepted_tokens(
    log_rho: torch.Tensor, mask: torch.Tensor, sequences: Sequences, rules: Sequence[Rule]
) -> torch.Tensor:
    """Tokens of `mask` that pass every rule, bool [rows, length].

    A token rule judges each token, a sequence rule (sum, mean or max over the sequence's tokens) all of them at once. With
    r = rho: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (Schulman 2020, "Approximating KL divergence"). For k1 the
    bounds are ratios: Rule("token_k1", 0.5, 2.0) keeps 0.5 <= r <= 2, Rule("seq_sum_k1", 0.5, 2.0) the same of the
    product over the sequence and seq_mean_k1 of its geometric mean (Liu et al. 2025, "When Speed Kills Stability").
    """
    kept = mask
    for rule in rules:
        scope, _, kind = rule.name.rpartition("_")
        values = _estimate(log_rho, kind)
        if scope == "token":
            kept = kept & _within(values, rule, kind)
        else:
            kept = kept & sequences.spread(_within(_over_sequence(values, mask, sequences, scope), rule, kind))
    return kept


def _estimate(log_rho: torch.Tensor, kind: str) -> torch.Tensor:
    """k1, k2 or k3 at each token; k1 keeps its sign."""
    match kind:
        case "k1":
            return -log_rho
        case "k2":
            return 0.5 * log_rho.square()
        case "k3":
            return torch.expm1(log_rho) - log_rho
    raise ValueError(f"there is no estimate {kind!r} to reject by: k1, k2 or k3")


def _over_sequence(values: torch.Tensor, mask: torch.Tensor, sequences: Sequences, scope: str) -> torch.Tensor:
    values = torch.where(mask, values, 0.0)
    match scope:
        case "seq_sum":
            return sequences.sum(values)
        case "seq_mean":
            return sequences.sum(values) / sequences.sum(mask).clamp(min=1)
        case "seq_max":
            return sequences.max(values, mask)
    raise ValueError(f"there is no scope {scope!r} to reject by: token, seq_sum, seq_mean or seq_max")


def _within(values: torch.Tensor, rule: Rule, kind: str) -> torch.Tensor:
    if kind != "k1":
        return values <= rule.high
    ratio = (-values).exp()  # of a sum of up to thousands of clamped terms it may be inf, which is outside any band
    return (ratio >= (rule.low or 0.0)) & (ratio <= rule.high)
