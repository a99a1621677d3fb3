"""The critic's objective: how far its values are from the returns, and what is reported of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from psrl.algorithms.metrics import MetricSums
from psrl.algorithms.tensors import masked

_CRITIC = "critic/sums/"
LEAST_VARIANCE = 1e-12
"""Returns that vary less than this leave nothing to explain."""


class ValueInputs(Protocol):
    """What the objective reads of a micro-batch; all [rows, length]. See `MicroBatch` for each."""

    @property
    def trained(self) -> torch.Tensor: ...
    @property
    def values(self) -> torch.Tensor | None: ...
    @property
    def returns(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Callable as `loss_fn(values, batch)`; the same object for every micro-batch and rank of an optimizer step.

    A token's loss is max((v - R)^2, (clip(v, V - c, V + c) - R)^2) / 2, with R its return, V the value at the buffer's start
    and c the clip range: a value that has moved further than c towards R gets no more gradient (PPO with generalised
    advantages as in the code of Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2022, "The 37 implementation details of
    PPO", detail 9). The mean is over all trained tokens of the step.
    """

    tokens: int
    """Trained tokens of the whole optimizer step, over all ranks."""
    clip: float | None = None
    """None: (v - R)^2 / 2."""

    @property
    def empty(self) -> bool:
        """Whether no token of the whole optimizer step is trained; see `LossFn`."""
        return self.tokens == 0

    def __call__(self, values: torch.Tensor, batch: ValueInputs) -> tuple[torch.Tensor, MetricSums]:
        if batch.values is None or batch.returns is None:
            raise ValueError("the critic learns from values and returns, which must be in every micro-batch")
        mask = batch.trained
        error = masked(values - batch.returns, mask).square()
        losses, clipped = error, torch.zeros_like(mask)
        if self.clip is not None:
            near = torch.clamp(values, batch.values - self.clip, batch.values + self.clip)
            bounded = masked(near - batch.returns, mask).square()
            losses, clipped = torch.maximum(error, bounded), bounded > error
        total = 0.5 * losses.sum()
        return total / max(self.tokens, 1), self._sums(total, clipped, batch)

    def _sums(self, total: torch.Tensor, clipped: torch.Tensor, batch: ValueInputs) -> MetricSums:
        assert batch.values is not None and batch.returns is not None  # see the caller
        returns = masked(batch.returns.double(), batch.trained)
        values = masked(batch.values.double(), batch.trained)
        missed = returns - values
        sums = {
            "tokens": batch.trained.sum(),
            "loss": total.detach(),
            "clipped": clipped.sum(),
            "values": values.sum(),
            "returns": returns.sum(),
            "returns_squared": returns.square().sum(),
            "missed": missed.sum(),
            "missed_squared": missed.square().sum(),
        }
        return {_CRITIC + name: value for name, value in sums.items()}


def finalise(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of one or more optimizer steps from their combined sums; other names are left out.

    critic/vf_loss; critic/vf_clipfrac: share of tokens whose gradient the clip took away; critic/values/mean and
    critic/returns/mean: of the buffer, before the critic learns from it; critic/vf_explained_var: 1 - var(R - V) / var(R), 1 for
    a critic that knows all returns, 0 for one that knows their mean, left out where they are all equal. {} when nothing
    was trained.
    """
    critic = {name.removeprefix(_CRITIC): value for name, value in sums.items() if name.startswith(_CRITIC)}
    tokens = critic.get("tokens", 0.0)
    if tokens == 0:
        return {}
    metrics = {
        "critic/vf_loss": critic["loss"] / tokens,
        "critic/vf_clipfrac": critic["clipped"] / tokens,
        "critic/values/mean": critic["values"] / tokens,
        "critic/returns/mean": critic["returns"] / tokens,
    }
    variance = critic["returns_squared"] / tokens - (critic["returns"] / tokens) ** 2
    if variance > LEAST_VARIANCE:
        missed = critic["missed_squared"] / tokens - (critic["missed"] / tokens) ** 2
        metrics["critic/vf_explained_var"] = 1.0 - missed / variance
    return metrics
