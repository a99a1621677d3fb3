"""One buffer as a trainer rank sees it arrive: micro-batches of tensors, each as soon as its samples are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from psrl.algorithms.advantages import SampleRewards
from psrl.algorithms.rewards import GroupRewards
from psrl.config.actor import ranks_of_a_row
from psrl.config.algorithm_checks import least_valid_samples
from psrl.config.schema import Config
from psrl.protocol.control import TakenGroup
from psrl.protocol.samples import Group
from psrl.trainer.backends.base import MicroBatch, TrainBackend
from psrl.trainer.batch import SampleIndex, build_micro_batches, groups_needed, rewards_of, sample_rewards
from psrl.trainer.chunks import Part
from psrl.trainer.micro_batches import MICRO_BATCH_COST
from psrl.trainer.objective import reward_shape
from psrl.trainer.step_plan import PlanSettings, StepPlan

Read = Callable[[TakenGroup], Group]
"""Reads a sealed group; a rank reads only what its own micro-batches need."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """This rank's micro-batches of optimizer step `number` of the buffer that have become ready; `complete`: no more come."""

    number: int
    batches: list[MicroBatch]
    complete: bool


@dataclass(slots=True)
class ArrivingBatch:
    """Feed it with `add`. Every rank is fed the same parts and has equally many micro-batches of each mini-batch."""

    actor: TrainBackend
    config: Config
    read: Read
    taken: list[TakenGroup] = field(default_factory=list)
    groups: dict[int, Group] = field(default_factory=dict)
    """What this rank has read, by position in the batch."""
    earned: dict[int, GroupRewards] = field(default_factory=dict)
    """Their rewards."""
    num_micro_batches: int = 0
    _plan: StepPlan = field(init=False)
    _index: SampleIndex = field(init=False)
    """Grows with the plan, whose groups it has."""

    def __post_init__(self) -> None:
        self._plan = StepPlan(plan_settings(self.actor, self.config))
        self._index = SampleIndex(group=self._plan.group_of, sample=[])

    def add(self, part: Part) -> list[MiniBatch]:
        """What `part` makes ready, in the order in which it is trained."""
        self.taken += part.groups
        tokens = [group.ref.tokens for group in part.groups]
        prompts = [group.ref.prompt_tokens for group in part.groups]
        minis = self._plan.extend(tokens, prompts, part.samples, part.last)
        self._index.sample.extend(sample for sizes in tokens for sample in range(len(sizes)))
        least, shape = self._plan.settings.least_valid, reward_shape(self.config)
        ready = []
        for mini in minis:
            mine = [ranks[self.actor.dp_rank] for ranks in mini.batches]
            needed = groups_needed(mine, self._index)
            self.groups |= {i: self.read(self.taken[i]) for i in needed if i not in self.groups}
            for i in needed:
                if i not in self.earned:
                    self.earned[i] = rewards_of(self.groups[i], self.taken[i].ref.tokens, least, shape)
            batches = build_micro_batches(mine, self._index, self.groups, self.earned, self.actor.device)
            self.num_micro_batches += len(batches)
            ready.append(MiniBatch(mini.number, batches, mini.complete))
        return ready

    def rewards(self) -> SampleRewards:
        """Of all samples so far; those of groups that this rank has not read are not valid."""
        return sample_rewards(self._index, self.earned)

    def sized(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Micro-batches whose vectors over samples have as many elements as `rewards`, also if they came before others."""
        count = len(self._index.group)
        return [replace(batch, sequences=replace(batch.sequences, count=count)) for batch in batches]


def plan_settings(actor: TrainBackend, config: Config) -> PlanSettings:
    """How this configuration cuts a buffer into micro-batches."""
    settings = config.train_actor_rollout_ref.actor
    return PlanSettings(
        mini_groups=settings.ppo_mini_batch_size or config.psrl.staleness_buffer_entries,
        least_valid=least_valid_samples(config.algorithm.adv_estimator),
        micro_samples=None if settings.use_dynamic_bsz else settings.ppo_micro_batch_size_per_gpu,
        num_ranks=actor.dp_size,
        max_tokens=settings.ppo_max_token_len_per_gpu,
        row_ranks=ranks_of_a_row(settings),
        padded=actor.pads,
        micro_batch_cost=MICRO_BATCH_COST[actor.device.type],
        hidden_size=actor.hidden_size if settings.use_shared_prompt and actor.can_share_prompts else None,
    )
