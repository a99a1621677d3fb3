"""The whole training step on a bigram table: every estimator, loss and correction, on any number of micro-batches and ranks."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from bigram_backend import BigramBackend, make_groups, taken_of
from loss_batches import run_ranks

from psrl.algorithms.kl import KLControl
from psrl.config.algorithm import AlgorithmConfig, KLControlConfig, OverlongBufferConfig, RolloutCorrectionConfig
from psrl.config.schema import ActorConfig, Config
from psrl.trainer.arriving import plan_settings
from psrl.trainer.chunks import whole
from psrl.trainer.objective import kl_control
from psrl.trainer.stages import needs_old_log_probs
from psrl.trainer.step import train_step
from psrl.trainer.step_plan import StepPlan

pytestmark = pytest.mark.unit


def make_config(actor=(), algorithm=(), correction=()) -> Config:
    config = Config()
    config.data.max_response_length = 8
    config.train_actor_rollout_ref.actor = ActorConfig(**dict(actor))
    config.algorithm = AlgorithmConfig(**dict(algorithm))
    config.algorithm.rollout_correction = RolloutCorrectionConfig(**dict(correction))
    return config


def train(config, groups, *, ranks=1, share=False, steps=1):
    """(table of logits after `steps` steps on these groups, metrics of the last one, of rank 0)."""
    taken = taken_of(groups)

    def of_rank(rank):
        def work(all_sum):
            actor = BigramBackend(all_sum, rank, ranks, can_share_prompts=share)
            reference = BigramBackend(all_sum, rank, ranks, seed=9)
            kl = kl_control(config)
            with_reference = config.algorithm.use_kl_in_reward or config.train_actor_rollout_ref.actor.use_kl_loss
            for _ in range(steps):
                result = train_step(
                    actor, config, whole(taken), lambda t: groups[t.ref.offset],
                    reference=reference if with_reference else None, kl=kl,
                )  # fmt: skip
                kl = result.kl
            return actor.table.detach(), result.metrics, kl

        return work

    results = run_ranks([of_rank(rank) for rank in range(ranks)])
    assert all(torch.equal(table, results[0][0]) for table, _, _ in results)
    return results[0]


def remax_groups():
    groups = make_groups()
    for group in groups:
        group.samples.append(msgspec.structs.replace(group.samples[-1], greedy=True, reward=0.3))
    return groups


CASES = {
    "grpo": {},
    "dr_grpo": {"algorithm": {"norm_adv_by_std_in_grpo": False}, "actor": {"loss_agg_mode": "seq-mean-token-sum-norm"}},
    "rloo": {"algorithm": {"adv_estimator": "rloo"}},
    "reinforce_plus_plus": {"algorithm": {"adv_estimator": "reinforce_plus_plus", "gamma": 0.9}},
    "remax": {"algorithm": {"adv_estimator": "remax"}},
    "mini-batches and epochs": {"actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 2}},
    "sequence means": {"actor": {"loss_agg_mode": "seq-mean-token-mean", "ppo_mini_batch_size": 2}},
    "entropy": {"actor": {"entropy_coeff": 0.1}},
    "kl in loss": {"actor": {"use_kl_loss": True, "kl_loss_coef": 0.2}},
    "kl in reward": {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": KLControlConfig(kl_coef=0.2)}},
    "kl in reward, plus plus": {
        "algorithm": {"use_kl_in_reward": True, "adv_estimator": "reinforce_plus_plus", "kl_penalty": "low_var_kl"}
    },
    "token weights": {"correction": {"preset": "token_tis"}},
    "normalised weights": {"correction": {"rollout_is": "sequence", "rollout_is_batch_normalize": True}},
    "icepop": {"correction": {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}},
    "rejection": {"correction": {"rollout_rs": "seq_mean_k1,token_k2", "rollout_rs_threshold": "0.5_2.0,0.5"}},
    "bypass": {"correction": {"bypass_mode": True}, "actor": {"ppo_mini_batch_size": 2}},
    "bypass with rejection": {"correction": {"bypass_mode": True, "rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.5}},
    "reinforce": {
        "correction": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}, "actor": {"ppo_mini_batch_size": 2},
    },
    "kl in reward, bypass": {"correction": {"bypass_mode": True}, "algorithm": {"use_kl_in_reward": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_no_split_changes_the_step(name):
    """Micro-batches of 64 tokens on one rank, of 16 on one, two and three ranks, of one sample, and with shared prompts."""
    groups = remax_groups() if name == "remax" else make_groups()
    case = CASES[name]

    def config(**actor):
        return make_config(**case | {"actor": dict(case.get("actor", {})) | actor})

    expected, metrics, _ = train(config(ppo_max_token_len_per_gpu=64), groups, steps=2)
    assert not torch.equal(expected, BigramBackend().table.detach())
    others = [
        (config(ppo_max_token_len_per_gpu=16), 1, False),
        (config(ppo_max_token_len_per_gpu=16), 2, False),
        (config(ppo_max_token_len_per_gpu=20), 3, True),
        (config(ppo_micro_batch_size_per_gpu=1), 2, True),
    ]
    for other, ranks, share in others:
        table, same, _ = train(other, groups, ranks=ranks, share=share, steps=2)
        torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)
        for key in metrics.keys() - {
            "training/num_micro_batches",
            "rollout_corr/rollout_is_min",
            "rollout_corr/rollout_is_max",
        }:
            assert same[key] == pytest.approx(metrics[key], rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize(
    ("case", "updates", "expected"),
    [
        ("grpo", 1, False),
        ("grpo", 2, True),
        ("bypass", 2, False),
        ("token weights", 1, False),
        ("normalised weights", 1, True),
        ("rejection", 1, True),
        ("bypass with rejection", 1, True),
        ("reinforce", 2, False),
        ("kl in reward", 1, True),
        ("kl in reward, bypass", 1, False),
    ],
)
def test_a_forward_pass_is_spent_only_where_a_stage_needs_it(case, updates, expected):
    assert needs_old_log_probs(make_config(**CASES[case]), updates) is expected


@pytest.mark.parametrize(("ulysses", "row_ranks"), [(1, 1), (2, 2)])
def test_ranks_that_share_rows_share_their_token_budget(ulysses, row_ranks):
    config = make_config({"ulysses_sequence_parallel_size": ulysses, "ppo_max_token_len_per_gpu": 7})
    settings = plan_settings(BigramBackend(), config)
    assert (settings.max_tokens, settings.row_ranks) == (7, row_ranks)


@pytest.mark.parametrize("unpadded", [False, True])
def test_what_the_model_does_with_padding_decides_what_a_micro_batch_holds(unpadded):
    config = make_config({"ppo_max_token_len_per_gpu": 8})
    plan = StepPlan(plan_settings(BigramBackend(pads=not unpadded), config))
    (mini,) = plan.extend([[6, 2]], [1], samples=2, last=True)
    assert [len(rows) for (rows,) in mini.batches] == ([2] if unpadded else [1, 1])


@pytest.mark.parametrize(("device", "micro_batches"), [("cpu", 2), ("cuda", 1)])
def test_where_one_more_micro_batch_costs_more_there_are_fewer(device, micro_batches):
    backend = BigramBackend()
    backend.device = torch.device(device)
    plan = StepPlan(plan_settings(backend, make_config()))
    (mini,) = plan.extend([[500, 2]], [1], samples=2, last=True)
    assert len(mini.batches) == micro_batches


def test_a_step_by_hand():
    """One group, two single-token samples, reward 0 and 1, Dr. GRPO: the gradient of the two log-probs is +-0.5 / 2."""
    (group,) = make_groups(1, 2, broken=False)
    for sample, token, reward in zip(group.samples, (3, 4), (0.0, 1.0), strict=True):
        sample.response_ids = token.to_bytes(4, "little")
        sample.logprobs, sample.mask, sample.reward = b"\0\0\0\0", b"", reward
    last = int.from_bytes(group.prompt_ids[-4:], "little")
    start = BigramBackend().table.detach()
    table, metrics, _ = train(make_config(algorithm={"norm_adv_by_std_in_grpo": False}), [group])
    expected = start.clone()
    expected[last, 4] += 0.5 * 0.25
    expected[last, 3] -= 0.5 * 0.25
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-12)
    assert metrics["actor/loss_tokens"] == 2


def test_a_group_with_one_sample_trains_where_the_estimator_can():
    groups = make_groups(3, 1, broken=False)
    table, metrics, _ = train(make_config(algorithm={"adv_estimator": "reinforce_plus_plus"}), groups)
    assert not torch.equal(table, BigramBackend().table.detach())
    assert metrics["actor/loss_tokens"] == sum(int(sum(s.mask)) for g in groups for s in g.samples)


def test_without_a_greedy_sample_remax_says_so():
    with pytest.raises(ValueError, match="greedy sample"):
        train(make_config(algorithm={"adv_estimator": "remax"}), make_groups())


def test_all_rejected_changes_nothing_and_is_reported():
    config = make_config(correction={"rollout_rs": "token_k2", "rollout_rs_threshold": 1e-12})
    table, metrics, _ = train(config, make_groups())
    assert torch.equal(table, BigramBackend().table.detach())
    assert metrics["rollout_corr/rs_masked_fraction"] == metrics["actor/skipped_steps"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_groups_without_two_rewards_train_nothing():
    groups = make_groups(2, 2, broken=False)
    for group in groups:
        group.samples[0].reward = None
    table, metrics, _ = train(make_config(), groups)
    assert torch.equal(table, BigramBackend().table.detach())
    assert "actor/pg_loss" not in metrics


def test_the_adaptive_kl_coefficient_goes_on_from_step_to_step_and_from_a_checkpoint():
    settings = KLControlConfig(type="adaptive", kl_coef=0.1, horizon=100, target_kl=1e-6)
    config = make_config(algorithm={"use_kl_in_reward": True, "kl_penalty": "k3", "kl_ctrl": settings})
    groups = make_groups(broken=False)
    _, metrics, kl = train(config, groups, steps=2)
    samples = sum(len(g.samples) for g in groups)
    assert metrics["actor/reward_kl_penalty"] > 1e-6
    assert kl.coefficient == pytest.approx(0.1 * (1 + 0.2 * samples / 100) ** 2)
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1 * (1 + 0.2 * samples / 100))
    assert kl_control(config, kl.coefficient) == kl
    assert kl_control(make_config(algorithm={"use_kl_in_reward": True}), 7.0) == KLControl(coefficient=0.001)
    assert kl_control(make_config()) is None


def test_overlong_shaping_changes_rewards_of_long_responses_only():
    groups = make_groups(broken=False)
    config = make_config(algorithm={"adv_estimator": "rloo"})
    plain, _, _ = train(config, groups)
    config.reward.overlong_buffer = OverlongBufferConfig(enable=True, len=1, penalty_factor=3.0)
    untouched, _, _ = train(config, groups)
    assert max(len(s.response_ids) for g in groups for s in g.samples) == 4 * 7
    assert torch.equal(untouched, plain)  # 7 tokens of 8 do not reach the last one
    config.reward.overlong_buffer.len = None  # a fifth of 8 is one token
    assert torch.equal(train(config, groups)[0], plain)
    config.reward.overlong_buffer.len = 4
    shaped, _, _ = train(config, groups)
    for group in groups:
        for sample in group.samples:
            sample.reward -= max(len(sample.response_ids) // 4 - 4, 0) / 4 * 3.0
    by_hand, _, _ = train(make_config(algorithm={"adv_estimator": "rloo"}), groups)
    torch.testing.assert_close(shaped, by_hand, rtol=0, atol=1e-12)
