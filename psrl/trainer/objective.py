"""From the configuration to the objects that compute: estimator, correction, loss, penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from psrl.algorithms.advantages import AdvantageOptions
from psrl.algorithms.aggregation import Aggregation
from psrl.algorithms.kl import KLControl
from psrl.algorithms.overlong import overlong_penalty
from psrl.algorithms.policy import PolicyLoss
from psrl.algorithms.policy_losses import Clip
from psrl.algorithms.rollout_correction import Correction, Rule
from psrl.algorithms.value import ValueLoss
from psrl.config.correction import parse_correction
from psrl.config.schema import Config
from psrl.trainer.backends.base import MicroBatch, TrainBackend
from psrl.trainer.batch import count_loss_sequences, count_loss_tokens


def correction_of(config: Config) -> Correction:
    """The rollout correction of `algorithm.rollout_correction`."""
    parsed = parse_correction(config.algorithm.rollout_correction)
    return Correction(
        level=parsed.level,
        low=parsed.low,
        high=parsed.high,
        batch_normalize=parsed.batch_normalize,
        rules=tuple(Rule(rule.name, rule.low, rule.high) for rule in parsed.rules),
        bypass_mode=parsed.bypass_mode,
        reinforce=parsed.loss_type == "reinforce",
    )


def advantage_options(config: Config) -> AdvantageOptions:
    algorithm = config.algorithm
    return AdvantageOptions(norm_by_std=algorithm.norm_adv_by_std_in_grpo, gamma=algorithm.gamma, lam=algorithm.lam)


def kl_control(config: Config, coefficient: float | None = None) -> KLControl | None:
    """The KL penalty of the reward, None without one. `coefficient`: where an adaptive one stood at the checkpoint."""
    if not config.algorithm.use_kl_in_reward:
        return None
    settings = config.algorithm.kl_ctrl
    adaptive = settings.type == "adaptive"
    return KLControl(
        coefficient=coefficient if adaptive and coefficient is not None else settings.kl_coef,
        target_kl=settings.target_kl,
        horizon=settings.horizon if adaptive else None,
    )


def reward_shape(config: Config) -> Callable[[int], float] | None:
    """What is added to the reward of a response of so many tokens; None: nothing."""
    overlong = config.reward.overlong_buffer
    if not overlong.enable:
        return None
    return partial(
        overlong_penalty,
        max_response_length=config.data.max_response_length,
        buffer=overlong.len or max(config.data.max_response_length // 5, 1),
        factor=overlong.penalty_factor,
    )


def policy_loss(actor: TrainBackend, config: Config, batches: Sequence[MicroBatch]) -> PolicyLoss:
    """The loss of one optimizer step over these micro-batches of this rank. Collective: it counts those of all ranks."""
    tokens, sequences = actor.all_sum([count_loss_tokens(batches), count_loss_sequences(batches)])
    return _loss_over(config, int(tokens), int(sequences))


def value_loss(actor: TrainBackend, config: Config, batches: Sequence[MicroBatch]) -> ValueLoss:
    """The critic's of one optimizer step over these micro-batches of this rank. Collective."""
    (tokens,) = actor.all_sum([count_loss_tokens(batches)])
    return ValueLoss(int(tokens), config.critic.cliprange_value)


def undivided_loss(config: Config) -> PolicyLoss:
    """The same loss while nobody knows yet what it is to be divided by."""
    return _loss_over(config, 1, 1)


def _loss_over(config: Config, tokens: int, sequences: int) -> PolicyLoss:
    settings = config.train_actor_rollout_ref.actor
    return PolicyLoss(
        aggregation=Aggregation(
            settings.loss_agg_mode,
            tokens,
            sequences,
            settings.loss_scale_factor or float(config.data.max_response_length),
        ),
        loss_mode=settings.policy_loss.loss_mode,
        clip=Clip(
            low=settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low,
            high=settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high,
            dual=settings.clip_ratio_c,
        ),
        correction=correction_of(config),
        entropy_coeff=settings.entropy_coeff,
        report_entropy=settings.calculate_entropy,
        kl_loss_coef=settings.kl_loss_coef if settings.use_kl_loss else None,
        kl_loss_type=settings.kl_loss_type,
        describe_correction=config.psrl.log_prob.enable_rollout_engine_log_prob,
    )
