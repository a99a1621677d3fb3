"""What is refused of the critic: one sentence each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from psrl.config.actor import ActorConfig, ranks_of_a_row
from psrl.config.errors import ConfigError

if TYPE_CHECKING:
    from psrl.config.schema import Config

CHOICES: dict[str, tuple[Any, ...]] = {"critic.optim.lr_scheduler_type": ("constant", "cosine")}
AT_LEAST: dict[str, float] = {
    "critic.ppo_epochs": 1,
    "critic.optim.lr_warmup_steps": 0,
    "critic.optim.min_lr_ratio": 0,
    "trainer.critic_warmup": 0,
}
POSITIVE = ("critic.optim.lr", "critic.grad_clip")


def needs_critic(config: Config) -> bool:
    """Whether a critic is trained beside the policy."""
    return config.algorithm.adv_estimator == "gae"


def ranks_of_a_critic_row(actor: ActorConfig) -> int:
    """Trainer ranks that hold a part of each row of the critic: those that share the policy's samples, however they do."""
    return ranks_of_a_row(actor) * actor.megatron.tensor_model_parallel_size


def policy_settings(config: Config) -> ActorConfig:
    """The policy's, which has padding if its critic has: both train on the same micro-batches."""
    actor = config.train_actor_rollout_ref.actor
    if needs_critic(config) and ranks_of_a_critic_row(actor) > 1 and actor.use_remove_padding is None:
        return replace(actor, use_remove_padding=False)
    return actor


def check_critic(config: Config) -> None:
    """Refuse what contradicts itself or cannot run (ConfigError)."""
    clip, warmup, steps = (
        config.critic.cliprange_value,
        config.trainer.critic_warmup,
        config.trainer.total_training_steps,
    )
    if clip is not None and clip <= 0:
        raise ConfigError(f"critic.cliprange_value={clip} is refused: it must be greater than 0, or null for no clip.")
    if not needs_critic(config):
        if warmup:
            raise ConfigError(
                f"trainer.critic_warmup={warmup} but algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic: leave it at 0, "
                "or use algorithm.adv_estimator=gae."
            )
        return
    actor = config.train_actor_rollout_ref.actor
    stages, tensor = actor.megatron.pipeline_model_parallel_size, actor.megatron.tensor_model_parallel_size
    if actor.use_remove_padding and tensor > 1:
        raise ConfigError(
            "train_actor_rollout_ref.actor.use_remove_padding=True cannot be had with algorithm.adv_estimator=gae and "
            f"train_actor_rollout_ref.actor.megatron.tensor_model_parallel_size={tensor}: the critic's rows are shared by {tensor} ranks, "
            "which keeps their padding. Leave the first at null, or use 1 for the last."
        )
    if stages > 1:
        raise ConfigError(
            "algorithm.adv_estimator=gae has a critic on FSDP2, which cannot go by train_actor_rollout_ref.actor.megatron."
            f"pipeline_model_parallel_size={stages}: use 1 (tensor and context parallelism may be more), or another estimator."
        )
    if steps is not None and warmup >= steps:
        raise ConfigError(
            f"trainer.critic_warmup={warmup} leaves no step for the policy (trainer.total_training_steps={steps}): lower it."
        )
    if config.critic.optim.lr_scheduler_type == "cosine" and steps is None:
        raise ConfigError(
            "critic.optim.lr_scheduler_type=cosine needs the length of the run: set trainer.total_training_steps."
        )
