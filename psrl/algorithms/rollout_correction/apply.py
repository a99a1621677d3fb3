"""A correction applied to a whole buffer: what is rejected, and the weights when their mean has to be known first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from psrl.algorithms.metrics import AllSum
from psrl.algorithms.rollout_correction.rejection import accepted_tokens
from psrl.algorithms.rollout_correction.settings import Correction
from psrl.algorithms.rollout_correction.weights import importance_weights, log_ratios, weight_sums
from psrl.algorithms.sequences import Sequences


class Corrected(Protocol):
    """What is read of a micro-batch; `old_log_probs` are those of the weights that train, at the start of the buffer."""

    @property
    def loss_mask(self) -> torch.Tensor: ...
    @property
    def rollout_log_probs(self) -> torch.Tensor: ...
    @property
    def old_log_probs(self) -> torch.Tensor | None: ...
    @property
    def sequences(self) -> Sequences: ...


@dataclass(frozen=True, slots=True)
class Applied:
    """`accepted` bool [rows, length], None: all; `weights` [rows, length], None: none, or computed in the loss."""

    accepted: torch.Tensor | None
    weights: torch.Tensor | None


def apply_correction(batches: Sequence[Corrected], correction: Correction, all_sum: AllSum) -> list[Applied]:
    """One result a micro-batch. Collective if weights are normalised: their mean is over all ranks' micro-batches, over
    tokens, or over sequences at level "sequence"; it includes what is rejected. A mean of 0 (every weight is 0) is left."""
    applied = [_apply(batch, correction) for batch in batches]
    if not (correction.weighs and correction.batch_normalize):
        return applied
    parts = [
        weight_sums(a.weights, b.loss_mask, b.sequences, correction.level)
        for a, b in zip(applied, batches, strict=True)
        if a.weights is not None
    ]
    total, count = all_sum([sum(p[0] for p in parts), sum(p[1] for p in parts)])
    scale = count / total if total > 0 else 1.0
    return [Applied(a.accepted, None if a.weights is None else a.weights * scale) for a in applied]


def _apply(batch: Corrected, correction: Correction) -> Applied:
    if batch.old_log_probs is None:
        raise ValueError("a correction of a whole buffer needs its old log-probs first")
    mask = batch.loss_mask
    log_rho = log_ratios(batch.old_log_probs, batch.rollout_log_probs, mask)
    return Applied(
        accepted_tokens(log_rho, mask, batch.sequences, correction.rules) if correction.rules else None,
        importance_weights(log_rho, mask, batch.sequences, correction) if correction.weighs else None,
    )
