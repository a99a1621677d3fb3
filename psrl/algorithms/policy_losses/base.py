"""What every policy loss gets and gives; see `policy_losses.POLICY_LOSSES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from psrl.algorithms.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Range of the ratio that still gets a gradient: [1 - low, 1 + high]. `high` > `low` is DAPO's clip-higher (Yu et al.
    2025, arXiv:2503.14476, eq. 10). `dual` > 1 bounds the loss of a token with a negative advantage; None: no bound."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """All [rows, length]. `log_ratio` = log_probs - old log-probs, clamped to +-20, 0 outside `mask`."""

    log_probs: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """All [rows, length]: `losses` to be summed over the mask; `clipped` (bool): the clip took the gradient away or bounded
    it; `clipped_dual` (bool): the dual clip did."""

    losses: torch.Tensor
    clipped: torch.Tensor
    clipped_dual: torch.Tensor


PolicyLossFn = Callable[[PolicyTokens, Clip], TokenLosses]
