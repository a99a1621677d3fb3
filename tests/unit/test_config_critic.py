"""The critic in the configuration: what is refused and what is accepted."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from test_config_algorithm import composed

from psrl.config.checks import check
from psrl.config.compose import compose_config
from psrl.config.critic_checks import check_critic, policy_settings
from psrl.config.errors import ConfigError

pytestmark = pytest.mark.unit

GAE = "algorithm.adv_estimator=gae"
OPTIM = "critic.optim"
MEGATRON = "train_actor_rollout_ref.actor.megatron"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.critic_warmup=3"], ["critic_warmup=3", "adv_estimator=grpo", "no critic"]),
        ([GAE, "trainer.critic_warmup=-1"], ["critic_warmup=-1", "at least 0"]),
        ([GAE, "trainer.critic_warmup=400"], ["critic_warmup=400", "total_training_steps=400", "lower it"]),
        ([GAE, "critic.cliprange_value=0"], ["cliprange_value=0", "null"]),
        ([GAE, "critic.ppo_epochs=0"], ["critic.ppo_epochs=0", "at least 1"]),
        ([GAE, "critic.grad_clip=0"], ["critic.grad_clip=0", "greater than 0"]),
        ([GAE, f"{OPTIM}.lr=0"], ["critic.optim.lr=0", "greater than 0"]),
        ([GAE, f"{OPTIM}.lr_scheduler_type=linear"], ["lr_scheduler_type=linear", "constant | cosine"]),
        (
            [GAE, f"{OPTIM}.lr_scheduler_type=cosine", "trainer.total_training_steps=null", "trainer.total_epochs=1",
             "train_actor_rollout_ref.actor.optim.lr_scheduler_type=constant"],
            ["critic.optim.lr_scheduler_type=cosine", "trainer.total_training_steps"],
        ),
        ([GAE, "psrl.fine_grain_overlap.granularity=mini_batch", "psrl.fine_grain_overlap.overlap_scope=accumulate"], ["adv_estimator=gae", "recompute"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_beside_megatron_a_critic_shares_samples_but_has_no_stages() -> None:
    config = composed(
        GAE, "train_actor_rollout_ref.actor.strategy=megatron", f"{MEGATRON}.tensor_model_parallel_size=2"
    )
    config.train_actor_rollout_ref.actor.megatron.context_parallel_size = 2
    check_critic(config)
    config.train_actor_rollout_ref.actor.megatron.pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match=r"critic on FSDP2, .*megatron\.pipeline_model_parallel_size=2: use 1"):
        check_critic(config)


def test_a_critic_whose_rows_are_shared_keeps_the_padding_of_the_policy_too() -> None:
    actor = "train_actor_rollout_ref.actor"
    shared = [f"{actor}.strategy=megatron", f"{MEGATRON}.tensor_model_parallel_size=2"]
    assert policy_settings(composed(GAE, *shared)).use_remove_padding is False
    for overrides in ([GAE], shared):
        assert policy_settings(composed(*overrides)).use_remove_padding is None
    with pytest.raises(ConfigError, match=r"use_remove_padding=True cannot be had .* shared by 2 ranks"):
        check_critic(composed(GAE, *shared, f"{actor}.use_remove_padding=True"))
    check_critic(composed(GAE, f"{actor}.use_remove_padding=True"))


@pytest.mark.parametrize(
    "overrides",
    [
        [GAE],
        [GAE, "psrl.rollout_n=1"],
        [GAE, "algorithm.lam=0.95", "trainer.critic_warmup=5", "critic.cliprange_value=null", "critic.ppo_epochs=2"],
        [GAE, "psrl.fine_grain_overlap.granularity=mini_batch", "train_actor_rollout_ref.actor.ppo_mini_batch_size=8"],
        [GAE, "algorithm.use_kl_in_reward=True"],
    ],
)
def test_what_can_be_is_accepted_without_a_word(overrides: list[str]) -> None:
    assert check(composed(*overrides)) == []


def test_shipped_defaults_are_those_of_verl() -> None:
    overrides = ["preset=cluster", "data.train_files=/x.parquet", "trainer.total_epochs=1", "algorithm=ppo"]
    config = OmegaConf.to_object(compose_config(overrides))
    critic = config.critic
    assert (critic.ppo_epochs, critic.cliprange_value, critic.grad_clip, critic.optim.lr) == (1, 0.5, 1.0, 1e-5)
    assert (config.algorithm.adv_estimator, config.trainer.critic_warmup, config.psrl.rollout_n) == ("gae", 0, 1)
    assert check(config) == []
