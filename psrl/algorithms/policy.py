"""The policy objective of one optimizer step: which old log-probs, which correction, which loss, which metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from psrl.algorithms import rollout_correction
from psrl.algorithms.losses import ppo_clip_loss
from psrl.algorithms.metrics import MetricSums

_ACTOR = "actor/sums/"
_CORRECTION = "rollout_corr/sums/"


class LossInputs(Protocol):
    """What the objective reads of a micro-batch; all [rows, length], `loss_mask` bool."""

    @property
    def loss_mask(self) -> torch.Tensor: ...
    @property
    def advantages(self) -> torch.Tensor: ...
    @property
    def rollout_log_probs(self) -> torch.Tensor: ...
    @property
    def old_log_probs(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Callable as `loss_fn(log_probs, batch)`; the same object for every micro-batch and rank of one optimizer step.

    Old log-probs of the PPO ratio: the engine's in `bypass_mode`; else `batch.old_log_probs`; else, when that is
    None, the update's own log-probs without gradient. The last is exact as long as the weights have not changed since
    the buffer's start, that is for the first mini-batch of the first epoch, and saves a forward pass.
    """

    global_tokens: int
    """Trainable tokens of the optimizer step over all micro-batches and ranks."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    token_tis: bool = False
    """Multiply each token's loss by min(rho, is_threshold). Not in bypass mode: the PPO ratio corrects already."""
    is_threshold: float = 2.0
    bypass_mode: bool = False
    describe_correction: bool = True
    """Also report how far the engine's log-probs are from the trained ones (rollout_corr/)."""

    def __call__(self, log_probs: torch.Tensor, batch: LossInputs) -> tuple[torch.Tensor, MetricSums]:
        mask, rollout = batch.loss_mask, batch.rollout_log_probs
        old = rollout if self.bypass_mode else batch.old_log_probs
        train = log_probs.detach() if old is None or self.bypass_mode else old
        weights = None
        if self.token_tis and not self.bypass_mode:
            weights = rollout_correction.token_tis_weights(train, rollout, mask, self.is_threshold)
        loss, sums = ppo_clip_loss(
            log_probs,
            old,
            batch.advantages,
            mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            global_tokens=self.global_tokens,
            weights=weights,
        )
        metrics = {_ACTOR + name: value for name, value in sums.items()}
        if not self.describe_correction:
            return loss, metrics
        correction = rollout_correction.correction_sums(
            train, rollout, mask, threshold=self.is_threshold, weights=weights
        )
        metrics |= {_CORRECTION + name: value for name, value in correction.items()}
        return loss, metrics


def finalise(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of one or more optimizer steps from their combined sums (`metrics.combine`); other names are left out.

    actor/pg_loss: token mean of the loss; actor/pg_clipfrac: share of tokens whose gradient the clip took away;
    actor/ppo_kl: mean of old - new log-prob; actor/loss_tokens; and all of `rollout_corr/` (see
    `rollout_correction.finalise`). {} when nothing was trained.
    """
    actor = {name.removeprefix(_ACTOR): value for name, value in sums.items() if name.startswith(_ACTOR)}
    correction = {name.removeprefix(_CORRECTION): value for name, value in sums.items() if name.startswith(_CORRECTION)}
    tokens = actor.get("tokens", 0.0)
    if tokens == 0:
        return {}
    result = {
        "actor/pg_loss": actor["loss"] / tokens,
        "actor/pg_clipfrac": actor["clipped"] / tokens,
        "actor/ppo_kl": actor["kl"] / tokens,
        "actor/loss_tokens": tokens,
    }
    described = rollout_correction.finalise(correction) if correction else {}
    return result | {f"rollout_corr/{k}": v for k, v in described.items()}
