"""The stages of `stages.py` in their order, for as much of a buffer as is there: what each scope of a step is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from psrl.algorithms import value
from psrl.algorithms.kl import KLControl
from psrl.algorithms.metrics import combine
from psrl.config.schema import Config
from psrl.trainer.arriving import ArrivingBatch, MiniBatch
from psrl.trainer.backends.base import MicroBatch, TrainBackend, ValueBackend
from psrl.trainer.objective import policy_loss, undivided_loss, value_loss
from psrl.trainer.stages import (
    needs_old_log_probs,
    with_advantages,
    with_correction,
    with_kl_penalty,
    with_old_log_probs,
    with_reference,
    with_values,
)


@dataclass(slots=True)
class Pipeline:
    """One step of `actor`. `reference` is the frozen initial policy, `kl` the controller of the penalty in the reward, `critic`
    the value model of gae (None: there is none). `only_critic`: the policy stays as it is."""

    actor: TrainBackend
    config: Config
    reference: TrainBackend | None = None
    kl: KLControl | None = None
    critic: ValueBackend | None = None
    only_critic: bool = False
    _penalties: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.critic is not None and _share(self.critic) != _share(self.actor):
            raise ValueError(
                f"policy and critic must work on the same samples: this rank has share (number, of how many) {_share(self.actor)} of the "
                f"policy's and {_share(self.critic)} of the critic's"
            )

    @property
    def epochs(self) -> int:
        return self.config.train_actor_rollout_ref.actor.ppo_epochs

    @property
    def mini_batches(self) -> int:
        """Of a whole buffer."""
        entries = self.config.psrl.staleness_buffer_entries
        return -(-entries // (self.config.train_actor_rollout_ref.actor.ppo_mini_batch_size or entries))

    def forward_passes(self, mini: MiniBatch) -> MiniBatch:
        """What each sample needs by itself: old log-probs, those of the weights at the buffer's start whatever was stepped
        since, the reference's, and the critic's values. The first optimizer step of a buffer, unless it is repeated, makes its own old ones."""
        batches = mini.batches
        updates = 1 if mini.number == 0 and self.epochs == 1 else self.mini_batches * self.epochs
        if needs_old_log_probs(self.config, updates):
            with self.actor.as_remembered():
                batches = with_old_log_probs(self.actor, batches)
        if self.reference is not None:
            batches = with_reference(self.reference, batches)
        if self.critic is not None:
            batches = with_values(self.critic, batches)
        return replace(mini, batches=batches)

    def score(self, batch: ArrivingBatch, steps: Sequence[Sequence[MicroBatch]]) -> list[list[MicroBatch]]:
        """What needs samples beside each other: KL penalty, advantages, correction, over all micro-batches of `steps`."""
        rewards, batches = batch.rewards(), batch.sized([b for step in steps for b in step])
        if not batches:  # on no rank then: all have the same plan
            return [[] for _ in steps]
        if self.kl is not None:
            penalised = with_kl_penalty(self.actor, self.config, self.kl, rewards, batches)
            rewards, batches = penalised.rewards, penalised.batches
            self._penalties.append((penalised.kl, penalised.samples))
        batches = with_advantages(self.actor, self.config, rewards, batches)
        scored = iter(with_correction(self.actor, self.config, batches))
        return [[next(scored) for _ in step] for step in steps]

    def update(self, step: Sequence[MicroBatch]) -> dict[str, float]:
        """An optimizer step on all micro-batches of a mini-batch; what the actor's `update` returns."""
        if self.only_critic:
            step = []
        return self.actor.update(step, policy_loss(self.actor, self.config, step))

    def accumulate(self, batches: Sequence[MicroBatch]) -> None:
        """Backward passes of a part of a mini-batch, of losses that are not divided by anything yet."""
        self.actor.accumulate(batches, undivided_loss(self.config))

    def step_accumulated(self, step: Sequence[MicroBatch]) -> dict[str, float]:
        """The optimizer step of a mini-batch whose micro-batches, all of `step`, went through `accumulate`."""
        whole, undivided = policy_loss(self.actor, self.config, step), undivided_loss(self.config)
        divisor = whole.aggregation.denominator / undivided.aggregation.denominator
        return self.actor.apply_gradients(0.0 if whole.empty else divisor)

    def update_critic(self, steps: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """The critic's optimizer steps on the whole scored buffer, one a mini-batch and epoch; its metrics."""
        if self.critic is None:
            return {}
        updates = [
            self.critic.update(step, value_loss(self.actor, self.config, step))
            for _ in range(self.config.critic.ppo_epochs)
            for step in steps
        ]
        return value.finalise(combine(updates)) | last_and_skipped(updates, "critic")

    def penalty(self) -> tuple[KLControl | None, dict[str, float]]:
        """The controller for the next step and the metrics of this one. All of a buffer has the same coefficient."""
        if self.kl is None:
            return None, {}
        samples = sum(count for _, count in self._penalties)
        mean = sum(kl * count for kl, count in self._penalties) / max(samples, 1)
        metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": self.kl.coefficient}
        return self.kl.after(mean, samples), metrics


def _share(model: TrainBackend) -> tuple[int, int]:
    return model.dp_rank, model.dp_size


def last_and_skipped(updates: Sequence[Mapping[str, float]], model: str) -> dict[str, float]:
    """Of the optimizer steps of a buffer: gradient norm and learning rate of the last one, and how many were not taken."""
    last = {f"{model}/{name}": updates[-1][f"{model}/{name}"] for name in ("grad_norm", "lr")}
    skipped = f"{model}/skipped_steps"
    return last | {skipped: sum(update[skipped] for update in updates)}
