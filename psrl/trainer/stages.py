"""What a buffer's micro-batches go through between being built and being trained on, one function a stage.

Each takes the micro-batches of this rank and returns them with one more field filled in. Those that forward a model work
micro-batch by micro-batch; advantages and correction see the whole buffer, over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from psrl.algorithms.advantages import ESTIMATORS, SampleRewards
from psrl.algorithms.kl import KLControl, kl_estimate
from psrl.algorithms.rollout_correction import apply_correction
from psrl.config.schema import Config
from psrl.trainer.backends.base import MicroBatch, TrainBackend, ValueBackend
from psrl.trainer.objective import advantage_options, correction_of


def needs_old_log_probs(config: Config, num_updates: int) -> bool:
    """Whether the log-probs of the weights at the buffer's start must be computed before the first of `num_updates`
    optimizer steps. With a single one they are the update's own, so no forward pass is spent on them, unless a stage
    before it needs them."""
    correction, algorithm = correction_of(config), config.algorithm
    if correction.needs_whole_buffer:
        return True
    return not correction.bypass_mode and (num_updates > 1 or algorithm.use_kl_in_reward)


def with_old_log_probs(actor: TrainBackend, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Those of the weights now. Collective."""
    grids = actor.log_probs_of(batches)
    return [replace(batch, old_log_probs=grid) for batch, grid in zip(batches, grids, strict=True)]


def with_reference(reference: TrainBackend, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Log-probs of the frozen initial policy. Collective."""
    grids = reference.log_probs_of(batches)
    return [replace(batch, ref_log_probs=grid) for batch, grid in zip(batches, grids, strict=True)]


def with_values(critic: ValueBackend, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Those of the critic now, which learns from a buffer only when all of it was used. Collective."""
    return [replace(batch, values=critic.values(batch)) for batch in batches]


@dataclass(frozen=True, slots=True)
class Penalised:
    """`rewards` and `batches` with the KL penalty; `kl`: mean estimate over samples of their token mean; `samples`: how many."""

    rewards: SampleRewards
    batches: list[MicroBatch]
    kl: float
    samples: int


def with_kl_penalty(
    actor: TrainBackend,
    config: Config,
    control: KLControl,
    rewards: SampleRewards,
    batches: Sequence[MicroBatch],
) -> Penalised:
    """Take the KL to the reference policy off the reward of each token (Ziegler et al. 2019, arXiv:1909.08593, eq. 2), estimated
    at the old log-probs: those of the buffer's start, the engine's in bypass mode. Collective: a group's samples may lie
    on several ranks."""
    bypass = config.algorithm.rollout_correction.bypass_mode
    totals = torch.zeros(len(rewards.outcome), dtype=torch.float64)
    means, count, penalised = 0.0, 0, []
    for batch in batches:
        old = batch.rollout_log_probs if bypass else batch.old_log_probs
        assert old is not None and batch.ref_log_probs is not None  # the stages before
        estimate = kl_estimate(old.double(), batch.ref_log_probs.double(), batch.loss_mask, config.algorithm.kl_penalty)
        sums, lengths = batch.sequences.sum(estimate), batch.sequences.sum(batch.loss_mask)
        totals += sums.cpu()
        means += float((sums / lengths.clamp(min=1)).sum())
        count += int((lengths > 0).sum())
        penalised.append(replace(batch, kl_penalty=control.coefficient * estimate))
    *totals_of_all, means, samples = actor.all_sum([*totals.tolist(), means, float(count)])
    penalty = control.coefficient * torch.tensor(totals_of_all, dtype=torch.float64)
    return Penalised(replace(rewards, kl_penalty=penalty), penalised, means / max(samples, 1.0), int(samples))


def with_advantages(
    actor: TrainBackend, config: Config, rewards: SampleRewards, batches: Sequence[MicroBatch]
) -> list[MicroBatch]:
    """Advantages of `algorithm.adv_estimator` over all these micro-batches (and returns, where a critic learns them).
    Collective."""
    estimator = ESTIMATORS[config.algorithm.adv_estimator]
    estimated = estimator(rewards, batches, advantage_options(config), actor.all_sum)
    returns: Sequence[torch.Tensor | None] = estimated.returns or [None] * len(batches)
    return [
        replace(batch, advantages=grid.float(), returns=None if target is None else target.float())
        for batch, grid, target in zip(batches, estimated.advantages, returns, strict=True)
    ]


def with_correction(actor: TrainBackend, config: Config, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """What rejection sampling keeps, and normalised importance weights. Nothing where a correction can be made in the loss.
    Collective."""
    correction = correction_of(config)
    if not correction.needs_whole_buffer:
        return list(batches)
    applied = apply_correction(batches, correction, actor.all_sum)
    return [
        replace(batch, accepted=result.accepted, is_weights=result.weights)
        for batch, result in zip(batches, applied, strict=True)
    ]
