"""Scopes of fine-grain overlap that train before the whole buffer is there. See `step.recompute` for the one that does not.

Both take optimizer steps while later parts still come. The old log-probs of a buffer are those of the weights at its start
whatever has been stepped since, and a step that is interrupted goes back to there: hence `remember`. A critic needs none of it,
since it learns after the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from psrl.trainer.arriving import ArrivingBatch, MiniBatch
from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.chunks import Part
from psrl.trainer.pipeline import Pipeline

Steps = list[list[MicroBatch]]
"""The micro-batches so far of each optimizer step of the buffer."""
Trained = tuple[Steps, list[dict[str, float]]]
"""All micro-batches of the buffer with what they were trained on, and the results of the policy's updates."""


def pre_step(pipeline: Pipeline, batch: ArrivingBatch, parts: Iterable[Part]) -> Trained:
    """Advantages of each part, and an optimizer step on each of its mini-batches."""
    _remember(pipeline)
    updates: list[dict[str, float]] = []
    steps: Steps = []
    for part in parts:
        for mini in _scored(pipeline, batch, part):
            join(steps, mini)
            if mini.complete:
                updates.append(pipeline.update(steps[mini.number]))
    return steps, updates


def accumulate(pipeline: Pipeline, batch: ArrivingBatch, parts: Iterable[Part]) -> Trained:
    """Advantages and backward passes of each part; when a mini-batch is complete, its gradient is divided by all that is in it
    and the optimizer step taken. Further epochs follow on the whole buffer."""
    _remember(pipeline)
    updates: list[dict[str, float]] = []
    steps: Steps = []
    for part in parts:
        for mini in _scored(pipeline, batch, part):
            pipeline.accumulate(mini.batches)
            join(steps, mini)
            if mini.complete:
                updates.append(pipeline.step_accumulated(steps[mini.number]))
    return steps, updates + [pipeline.update(step) for _ in range(1, pipeline.epochs) for step in steps]


def join(steps: Steps, mini: MiniBatch) -> None:
    """Add what has become ready to its step."""
    if mini.number == len(steps):
        steps.append([])
    steps[mini.number] += mini.batches


def _scored(pipeline: Pipeline, batch: ArrivingBatch, part: Part) -> list[MiniBatch]:
    """What `part` makes ready, after all forward passes, with advantages from these samples alone."""
    minis = [pipeline.forward_passes(mini) for mini in batch.add(part)]
    scored = pipeline.score(batch, [mini.batches for mini in minis])
    return [replace(mini, batches=batches) for mini, batches in zip(minis, scored, strict=True)]


def _remember(pipeline: Pipeline) -> None:
    """Nothing is stepped on before the end of a buffer that is one mini-batch."""
    if pipeline.mini_batches > 1:
        pipeline.actor.remember()
