"""One training step, top to bottom: plan, read, log-probs, rewards, advantages, correction, updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from psrl.algorithms import policy
from psrl.algorithms.kl import KLControl
from psrl.algorithms.metrics import combine
from psrl.config.algorithm_checks import least_valid_samples
from psrl.config.schema import ActorConfig, Config
from psrl.protocol.control import TakenGroup
from psrl.protocol.samples import Group
from psrl.trainer.backends.base import MicroBatch, TrainBackend
from psrl.trainer.batch import (
    SampleIndex,
    build_micro_batches,
    groups_needed,
    index_samples,
    rewards_of,
    sample_rewards,
)
from psrl.trainer.micro_batches import mini_batches, plan_micro_batches, trainable_samples
from psrl.trainer.objective import policy_loss, reward_shape
from psrl.trainer.rows import Row, separate_rows, shared_rows
from psrl.trainer.stages import (
    needs_old_log_probs,
    with_advantages,
    with_correction,
    with_kl_penalty,
    with_old_log_probs,
    with_reference,
)


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
    taken: Sequence[TakenGroup],
    read: Callable[[TakenGroup], Group],
    *,
    reference: TrainBackend | None = None,
    kl: KLControl | None = None,
) -> StepResult:
    """Train `actor` on one buffer of groups (batch order). Every rank calls it with the same `taken`; each reads, by
    `read`, only the groups that its own micro-batches need. `reference` is the frozen initial policy, `kl` the controller of
    the penalty in the reward (None: there is none)."""
    settings = config.train_actor_rollout_ref.actor
    least_valid = least_valid_samples(config.algorithm.adv_estimator)
    tokens = [group.ref.tokens for group in taken]
    samples = trainable_samples(tokens, least_valid)
    index = index_samples(tokens)
    minis = mini_batches(len(taken), settings.ppo_mini_batch_size)
    rows = [_rows(actor, settings, taken, index, _only(samples.lengths, index, mini)) for mini in minis]
    plans = [
        plan_micro_batches([row.length for row in mini], actor.world_size, settings.ppo_max_token_len_per_gpu)
        for mini in rows
    ]
    mine = [
        [[mini[i] for i in batch] for batch in plan.ranks[actor.rank]] for mini, plan in zip(rows, plans, strict=True)
    ]
    groups = {i: read(taken[i]) for step in mine for i in groups_needed(step, index)}
    earned = {i: rewards_of(g, tokens[i], least_valid, reward_shape(config)) for i, g in groups.items()}
    rewards = sample_rewards(index, earned)
    batches = build_micro_batches(list(chain.from_iterable(mine)), index, groups, earned)
    metrics: dict[str, Any] = {"training/num_micro_batches": sum(plan.num_micro_batches for plan in plans)}

    if needs_old_log_probs(config, len(minis) * settings.ppo_epochs):
        batches = with_old_log_probs(actor, batches)
    if reference is not None:
        batches = with_reference(reference, batches)
    if kl is not None:
        penalised = with_kl_penalty(actor, config, kl, rewards, batches)
        rewards, batches = penalised.rewards, penalised.batches
        metrics |= {"actor/reward_kl_penalty": penalised.kl, "actor/reward_kl_penalty_coeff": kl.coefficient}
        kl = kl.after(penalised.kl, penalised.samples)
    batches = with_advantages(actor, config, rewards, batches)
    batches = with_correction(actor, config, batches)

    parts: list[dict[str, float]] = []
    steps = _split(batches, [len(step) for step in mine])
    for _ in range(settings.ppo_epochs):
        parts += [actor.update(step, policy_loss(actor, config, step)) for step in steps]
    last = {name: parts[-1][name] for name in ("actor/grad_norm", "actor/lr", "actor/skipped_steps")}
    return StepResult(policy.finalise(combine(parts)) | last | metrics, groups, kl)


def _split(batches: Sequence[MicroBatch], sizes: Sequence[int]) -> list[Sequence[MicroBatch]]:
    """`_split([a, b, c], [1, 2]) == [[a], [b, c]]`."""
    return [batches[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


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
