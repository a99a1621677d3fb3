"""Estimates of KL(policy || reference) from the log-probs of sampled tokens, and the controller of its coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from psrl.algorithms.tensors import clamped_log_ratio

KL_TYPES = {
    "k1": "k1",
    "kl": "k1",
    "abs": "abs",
    "k2": "k2",
    "mse": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
}
"""Every accepted name -> the estimator that it means."""

K3_LIMIT = 10.0
"""k3 grows exponentially where the policy has made a token unlikely; one such token must not decide the step."""


def kl_estimate(
    log_probs: torch.Tensor, reference_log_probs: torch.Tensor, mask: torch.Tensor, kind: str
) -> torch.Tensor:
    """Estimate at each token, [rows, length], 0 outside `mask` (Schulman 2020, "Approximating KL divergence").

    With d = log p - log p_ref clamped to +-20: k1 = d (unbiased, may be negative; the expectation of its gradient is zero,
    so as a loss it does nothing but add noise), abs = |d|, k2 = d^2 / 2 (small bias; its gradient is that of the KL),
    k3 = e^-d - 1 + d (unbiased, never negative), at most 10.
    """
    difference = clamped_log_ratio(log_probs, reference_log_probs, mask)
    match KL_TYPES.get(kind):
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            return (torch.expm1(-difference) + difference).clamp(max=K3_LIMIT)
    raise ValueError(f"the kind of KL estimate is {kind!r}; it must be one of {', '.join(KL_TYPES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KLControl:
    """Coefficient of the KL penalty in the reward; `horizon` None keeps it fixed.

    Adaptive (Ziegler et al. 2019, arXiv:1909.08593, section 2.2): after each batch of n samples it is multiplied by
    1 + clip(kl / target_kl - 1, -0.2, 0.2) n / horizon, so it rises while the policy is further away than `target_kl`. No batch
    counts for more than the horizon: a factor of 5 horizons would make the coefficient negative.
    """

    coefficient: float
    target_kl: float = 0.1
    horizon: int | None = None

    def after(self, kl: float, samples: int) -> KLControl:
        """The controller after a batch whose mean penalty is `kl`.

        `KLControl(coefficient=1.0, target_kl=0.1, horizon=100).after(0.3, 10).coefficient == 1.02`. A `kl` that is not finite
        (weights that diverged) says nothing.
        """
        if self.horizon is None or not math.isfinite(kl):
            return self
        error = min(max(kl / self.target_kl - 1.0, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1.0 + error * min(samples / self.horizon, 1.0)))
