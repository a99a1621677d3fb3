"""One training step, top to bottom: parts of the buffer arrive, forward passes, scoring, updates of policy and critic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psrl.algorithms import policy
from psrl.algorithms.kl import KLControl
from psrl.algorithms.metrics import combine
from psrl.config.overlap_checks import effective_chunk
from psrl.config.schema import Config
from psrl.protocol.samples import Group
from psrl.trainer.arriving import ArrivingBatch, Read
from psrl.trainer.backends.base import TrainBackend, ValueBackend
from psrl.trainer.chunks import Part
from psrl.trainer.overlap import Steps, Trained, accumulate, join, pre_step
from psrl.trainer.pipeline import Pipeline, last_and_skipped


@dataclass(frozen=True, slots=True)
class StepResult:
    """`metrics` are those of the optimizer; `groups` what this rank has read, by position in the batch; `kl` the KL penalty's
    controller for the next step."""

    metrics: dict[str, Any]
    groups: dict[int, Group]
    kl: KLControl | None = None


def train_step(
    actor: TrainBackend,
    config: Config,
    parts: Iterable[Part],
    read: Read,
    *,
    reference: TrainBackend | None = None,
    kl: KLControl | None = None,
    critic: ValueBackend | None = None,
    only_critic: bool = False,
) -> StepResult:
    """Train `actor` on one buffer. Every rank calls it with the same `parts`, which may come while rollout still fills the
    buffer; what is done with each is up to `psrl.fine_grain_overlap.overlap_scope`. Each rank reads, by `read`, only the
    groups that its own micro-batches need. `reference` is the frozen initial policy, `kl` the controller of the penalty in
    the reward, `critic` the value model of gae (None: there is none). `only_critic`: the policy stays as it is
    (`actor/skipped_steps`)."""
    batch = ArrivingBatch(actor, config, read)
    pipeline = Pipeline(actor, config, reference, kl, critic, only_critic)
    overlapped = effective_chunk(config).granularity != "none"
    scope = config.psrl.fine_grain_overlap.overlap_scope if overlapped else "recompute"
    scopes = {"recompute": recompute, "pre_step": pre_step, "accumulate": accumulate}
    steps, updates = scopes[scope](pipeline, batch, parts)
    learned = pipeline.update_critic(steps)
    kl, penalty = pipeline.penalty()
    optimizer = last_and_skipped(updates, "actor")
    micro_batches = {"training/num_micro_batches": batch.num_micro_batches}
    metrics = policy.finalise(combine(updates)) | optimizer | learned | penalty | micro_batches
    return StepResult(metrics, batch.groups, kl)


def recompute(pipeline: Pipeline, batch: ArrivingBatch, parts: Iterable[Part]) -> Trained:
    """Forward passes as parts arrive, everything else once the buffer is whole. Also how a buffer trains that comes whole."""
    steps: Steps = []
    for part in parts:
        for mini in batch.add(part):
            join(steps, pipeline.forward_passes(mini))
    steps = pipeline.score(batch, steps)
    return steps, [pipeline.update(step) for _ in range(pipeline.epochs) for step in steps]
