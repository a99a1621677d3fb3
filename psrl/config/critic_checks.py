"""What is refused of the critic: one sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    stages = config.train_actor_rollout_ref.actor.megatron.pipeline_model_parallel_size
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
