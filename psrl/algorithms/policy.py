"""The policy objective of one optimizer step: which old log-probs, which correction, which loss, which metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from psrl.algorithms import rollout_correction
from psrl.algorithms.aggregation import Aggregation
from psrl.algorithms.kl import kl_estimate
from psrl.algorithms.metrics import MetricSums
from psrl.algorithms.policy_losses import POLICY_LOSSES, Clip, PolicyTokens, TokenLosses, reinforce
from psrl.algorithms.rollout_correction import Correction, importance_weights, log_ratios
from psrl.algorithms.sequences import Sequences
from psrl.algorithms.tensors import clamped_log_ratio, masked

_ACTOR = "actor/sums/"
_CORRECTION = "rollout_corr/sums/"


class LossInputs(Protocol):
    """What the objective reads of a micro-batch; all [rows, length], masks bool. See `MicroBatch` for each."""

    @property
    def loss_mask(self) -> torch.Tensor: ...
    @property
    def sequences(self) -> Sequences: ...
    @property
    def advantages(self) -> torch.Tensor: ...
    @property
    def rollout_log_probs(self) -> torch.Tensor: ...
    @property
    def old_log_probs(self) -> torch.Tensor | None: ...
    @property
    def ref_log_probs(self) -> torch.Tensor | None: ...
    @property
    def accepted(self) -> torch.Tensor | None: ...
    @property
    def is_weights(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Callable as `loss_fn(log_probs, batch, entropy)`; the same object for every micro-batch and rank of an optimizer step.

    Old log-probs of the PPO ratio: the engine's in bypass mode; else `batch.old_log_probs`; else, when that is None, the
    update's own log-probs without gradient. The last is exact as long as the weights have not changed since the buffer's
    start, that is for the first mini-batch of the first epoch, and saves a forward pass. The correction compares the
    engine with the weights at the buffer's start in the same way.
    """

    aggregation: Aggregation
    loss_mode: str = "vanilla"
    clip: Clip = field(default_factory=Clip)
    correction: Correction = field(default_factory=Correction)
    entropy_coeff: float = 0.0
    """How much the mean entropy counts as a bonus; not 0: the backend must hand over entropies."""
    report_entropy: bool = False
    kl_loss_coef: float | None = None
    """Coefficient of the KL to the reference policy as a part of the loss; None: no such part."""
    kl_loss_type: str = "low_var_kl"
    describe_correction: bool = True
    """Also report how far the engine's log-probs are from the trained ones (rollout_corr/)."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy` must be given; see `LossFn`."""
        return self.entropy_coeff != 0.0 or self.report_entropy

    @property
    def empty(self) -> bool:
        """Whether no token of the whole optimizer step is trained; see `LossFn`."""
        return self.aggregation.tokens == 0

    def __call__(
        self, log_probs: torch.Tensor, batch: LossInputs, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, MetricSums]:
        """(this micro-batch's part of the loss, already over the global denominator; its partial metrics)."""
        mask = batch.loss_mask if batch.accepted is None else batch.loss_mask & batch.accepted
        weights = self._weights(log_probs, batch)
        tokens, losses = self._token_losses(log_probs, batch, mask)
        token_losses = losses.losses if weights is None else losses.losses * weights.to(losses.losses.dtype)
        policy = self.aggregation.numerator(token_losses, mask, batch.sequences)
        total = policy
        metrics = _actor_sums(tokens, losses, policy, self.aggregation)
        if self.kl_loss_coef is not None:
            kl = self._kl_to_reference(log_probs, batch, mask)
            total = total + self.kl_loss_coef * kl
            metrics["kl_loss"] = kl.detach()
        if entropy is not None:
            mean_entropy = self.aggregation.numerator(entropy, mask, batch.sequences)
            if self.entropy_coeff != 0.0:
                total = total - self.entropy_coeff * mean_entropy
            metrics["entropy"] = masked(entropy.detach(), mask).double().sum()
        metrics = {_ACTOR + name: value for name, value in metrics.items()}
        return total / self.aggregation.denominator, metrics | self._describe(log_probs, batch, weights)

    def _token_losses(
        self, log_probs: torch.Tensor, batch: LossInputs, mask: torch.Tensor
    ) -> tuple[PolicyTokens, TokenLosses]:
        old = batch.rollout_log_probs if self.correction.bypass_mode else batch.old_log_probs
        old = log_probs.detach() if old is None else old
        tokens = PolicyTokens(
            log_probs=log_probs,
            log_ratio=clamped_log_ratio(log_probs, old, mask),
            advantages=masked(batch.advantages, mask),
            mask=mask,
            sequences=batch.sequences,
        )
        loss = reinforce if self.correction.reinforce else POLICY_LOSSES[self.loss_mode]
        return tokens, loss(tokens, self.clip)

    def _weights(self, log_probs: torch.Tensor, batch: LossInputs) -> torch.Tensor | None:
        """Those of the buffer's correction stage, else made here: in bypass mode of the weights now, which the engine's are
        compared with then, else of those at the buffer's start."""
        if batch.is_weights is not None or not self.correction.weighs:
            return batch.is_weights
        train = log_probs.detach() if self.correction.bypass_mode else _train(log_probs, batch)
        log_rho = log_ratios(train, batch.rollout_log_probs, batch.loss_mask)
        return importance_weights(log_rho, batch.loss_mask, batch.sequences, self.correction)

    def _kl_to_reference(self, log_probs: torch.Tensor, batch: LossInputs, mask: torch.Tensor) -> torch.Tensor:
        if batch.ref_log_probs is None:
            raise ValueError("use_kl_loss needs the reference policy's log-probs in every micro-batch")
        estimate = kl_estimate(log_probs, batch.ref_log_probs, mask, self.kl_loss_type)
        return self.aggregation.numerator(estimate, mask, batch.sequences)

    def _describe(self, log_probs: torch.Tensor, batch: LossInputs, weights: torch.Tensor | None) -> MetricSums:
        if not self.describe_correction:
            return {}
        sums = rollout_correction.correction_sums(
            _train(log_probs, batch),
            batch.rollout_log_probs,
            batch.loss_mask,
            batch.sequences,
            correction=self.correction,
            weights=weights,
            accepted=batch.accepted,
        )
        return {_CORRECTION + name: value for name, value in sums.items()}


def _train(log_probs: torch.Tensor, batch: LossInputs) -> torch.Tensor:
    """Log-probs of the weights that train, at the buffer's start where they are known."""
    return log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs


def _actor_sums(
    tokens: PolicyTokens, losses: TokenLosses, policy: torch.Tensor, aggregation: Aggregation
) -> MetricSums:
    """`tokens`; `loss` and `share` (of its denominator); `clipped`, `clipped_dual` tokens; `kl`: sum of old - new."""
    mask = tokens.mask
    return {
        "tokens": mask.sum(),
        "loss": policy.detach(),
        "share": aggregation.share(mask, tokens.sequences),
        "clipped": (losses.clipped & mask).sum(),
        "clipped_dual": (losses.clipped_dual & mask).sum(),
        "kl": -tokens.log_ratio.detach().double().sum(),
    }


def finalise(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of one or more optimizer steps from their combined sums (`metrics.combine`); other names are left out.

    actor/pg_loss: the policy loss as `loss_agg_mode` means it; actor/pg_clipfrac: share of tokens whose gradient the clip
    took away; actor/pg_clipfrac_lower: share that the dual clip bounded; actor/ppo_kl: mean of old - new log-prob;
    actor/loss_tokens; actor/kl_loss (before its coefficient) and actor/entropy (token mean) where they were computed; and
    all of `rollout_corr/` (see `rollout_correction.finalise`). {} when nothing was trained.
    """
    actor = {name.removeprefix(_ACTOR): value for name, value in sums.items() if name.startswith(_ACTOR)}
    correction = {name.removeprefix(_CORRECTION): value for name, value in sums.items() if name.startswith(_CORRECTION)}
    described = rollout_correction.finalise(correction) if correction else {}
    metrics = {f"rollout_corr/{k}": v for k, v in described.items()}
    tokens = actor.get("tokens", 0.0)
    if tokens == 0:
        return metrics
    metrics = {
        "actor/pg_loss": actor["loss"] / actor["share"],
        "actor/pg_clipfrac": actor["clipped"] / tokens,
        "actor/pg_clipfrac_lower": actor["clipped_dual"] / tokens,
        "actor/ppo_kl": actor["kl"] / tokens,
        "actor/loss_tokens": tokens,
    } | metrics
    if "kl_loss" in actor:
        metrics["actor/kl_loss"] = actor["kl_loss"] / actor["share"]
    if "entropy" in actor:
        metrics["actor/entropy"] = actor["entropy"] / tokens
    return metrics
