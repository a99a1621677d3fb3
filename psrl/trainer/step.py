"""One training step, top to bottom: plan, read, advantages, old log-probs, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.algorithms import policy
from psrl.algorithms.metrics import combine
from psrl.algorithms.policy import PolicyLoss
from psrl.config.schema import ActorConfig, Config
from psrl.protocol.control import TakenGroup
from psrl.protocol.samples import Group
from psrl.trainer.backends.base import MicroBatch, TrainBackend
from psrl.trainer.batch import (
    SampleIndex,
    build_micro_batches,
    count_loss_tokens,
    group_advantages,
    groups_needed,
    index_samples,
)
from psrl.trainer.micro_batches import mini_batches, plan_micro_batches, trainable_samples
from psrl.trainer.rows import Row, separate_rows, shared_rows


@dataclass(frozen=True, slots=True)
class StepResult:
    """`metrics` are those of the optimizer; `groups` what this rank has read, by position in the batch."""

    metrics: dict[str, Any]
    groups: dict[int, Group]


def train_step(
    actor: TrainBackend, config: Config, taken: Sequence[TakenGroup], read: Callable[[TakenGroup], Group]
) -> StepResult:
    """Train `actor` on one buffer of groups (batch order). Every rank calls it with the same `taken`; each reads, by
    `read`, only the groups that its own micro-batches need."""
    settings, correction = config.train_actor_rollout_ref.actor, config.algorithm.rollout_correction
    tokens = [group.ref.tokens for group in taken]
    samples = trainable_samples(tokens)
    index = index_samples(tokens)
    minis = mini_batches(len(taken), settings.ppo_mini_batch_size)
    rows = [_rows(actor, settings, taken, index, _only(samples.lengths, index, mini)) for mini in minis]
    plans = [
        plan_micro_batches([row.length for row in mini], actor.dp_size, settings.ppo_max_token_len_per_gpu)
        for mini in rows
    ]
    mine = [
        [[mini[i] for i in batch] for batch in plan.ranks[actor.dp_rank]]
        for mini, plan in zip(rows, plans, strict=True)
    ]
    groups = {i: read(taken[i]) for step in mine for i in groups_needed(step, index)}
    advantages = {
        i: group_advantages(g, tokens[i], config.algorithm.norm_adv_by_std_in_grpo) for i, g in groups.items()
    }
    steps = [build_micro_batches(step, index, groups, advantages) for step in mine]

    # With a single optimizer step the old log-probs are the update's own, so no forward pass is spent on them.
    if len(steps) * settings.ppo_epochs > 1 and not correction.bypass_mode:
        steps = [[_with_old_log_probs(actor, batch) for batch in step] for step in steps]

    parts: list[dict[str, float]] = []
    for _ in range(settings.ppo_epochs):
        for step in steps:
            loss = PolicyLoss(
                global_tokens=int(actor.all_sum([count_loss_tokens(step)])[0]),
                clip_low=settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low,
                clip_high=settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high,
                token_tis=correction.rollout_is == "token",
                is_threshold=correction.rollout_is_threshold,
                bypass_mode=correction.bypass_mode,
                describe_correction=config.psrl.log_prob.enable_rollout_engine_log_prob,
            )
            parts.append(actor.update(step, loss))
    last = {name: parts[-1][name] for name in ("actor/grad_norm", "actor/lr", "actor/skipped_steps")}
    micro_batches = {"training/num_micro_batches": sum(plan.num_micro_batches for plan in plans)}
    return StepResult(policy.finalise(combine(parts)) | last | micro_batches, groups)


def _only(lengths: Sequence[int], index: SampleIndex, groups: range) -> list[int]:
    """`lengths` with 0 for the samples of other groups."""
    return [length if index.group[i] in groups else 0 for i, length in enumerate(lengths)]


def _rows(
    actor: TrainBackend, settings: ActorConfig, taken: Sequence[TakenGroup], index: SampleIndex, lengths: Sequence[int]
) -> list[Row]:
    if not (settings.use_shared_prompt and actor.can_share_prompts):
        return separate_rows(lengths)
    prompts = [group.ref.prompt_tokens for group in taken]
    return shared_rows(lengths, index.group, prompts, actor.hidden_size, settings.ppo_max_token_len_per_gpu)


def _with_old_log_probs(actor: TrainBackend, batch: MicroBatch) -> MicroBatch:
    return dataclasses.replace(batch, old_log_probs=actor.log_probs(batch))
