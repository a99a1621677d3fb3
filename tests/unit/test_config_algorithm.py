"""Algorithms and rollout correction in the configuration: what is read, refused and warned about."""

from __future__ import annotations

import copy
import functools

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from psrl.algorithms.advantages import ESTIMATORS
from psrl.algorithms.aggregation import LOSS_AGG_MODES
from psrl.algorithms.kl import KL_TYPES
from psrl.algorithms.policy_losses import POLICY_LOSSES
from psrl.config import algorithm_checks
from psrl.config.algorithm import RolloutCorrectionConfig
from psrl.config.algorithm_checks import check_algorithm
from psrl.config.checks import check
from psrl.config.compose import compose_config, conf_dir, normalise
from psrl.config.correction import ParsedCorrection, ParsedRule, parse_correction
from psrl.config.errors import ConfigError

pytestmark = pytest.mark.unit

A, C = "train_actor_rollout_ref.actor", "algorithm.rollout_correction"
REINFORCE = [f"{C}.bypass_mode=True", f"{C}.loss_type=reinforce"]


@functools.cache
def laptop():
    return compose_config(["preset=laptop", "task=chain_sum"])


def composed(*overrides: str):
    """The laptop preset with these overrides, read by Hydra's own parser (composing for each case would take minutes)."""
    config = copy.deepcopy(laptop())
    for override in normalise(["preset=laptop", *overrides], has_accelerator=False, on_slurm=False)[0]:
        parsed = OverridesParser.create().parse_override(override)
        if parsed.key_or_group not in ("preset", "task"):
            OmegaConf.update(config, parsed.key_or_group, parsed.value(), force_add=False)
    return OmegaConf.to_object(config)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.adv_estimator=ppo"], ["adv_estimator=ppo", "grpo | gae"]),
        (["psrl.rollout_n=1"], ["psrl.rollout_n=1", "adv_estimator=grpo", "reinforce_plus_plus"]),
        (["psrl.rollout_n=1", "algorithm.adv_estimator=rloo"], ["psrl.rollout_n=1", "adv_estimator=rloo"]),
        (["algorithm.gamma=1.5"], ["algorithm.gamma=1.5", "at most 1"]),
        (["algorithm.lam=-0.1"], ["algorithm.lam=-0.1", "at least 0"]),
        (["algorithm.kl_ctrl.type=linear"], ["kl_ctrl.type=linear", "fixed | adaptive"]),
        (["algorithm.kl_ctrl.horizon=0"], ["kl_ctrl.horizon=0", "at least 1"]),
        (["algorithm.kl_ctrl.target_kl=0"], ["kl_ctrl.target_kl=0", "greater than 0"]),
        (["algorithm.kl_penalty=full"], ["kl_penalty=full", "low_var_kl"]),
        ([f"{A}.policy_loss.loss_mode=ppo"], ["loss_mode=ppo", "vanilla | gspo | cispo"]),
        ([f"{A}.loss_agg_mode=mean"], ["loss_agg_mode=mean", "seq-mean-token-sum"]),
        ([f"{A}.loss_scale_factor=0"], ["loss_scale_factor=0", "greater than 0"]),
        ([f"{A}.clip_ratio=0"], ["clip_ratio=0", "greater than 0"]),
        ([f"{A}.clip_ratio_c=1.0"], ["clip_ratio_c=1.0", "greater than 1"]),
        ([f"{A}.clip_ratio_high=-0.1"], ["clip_ratio_high=-0.1", "greater than 0"]),
        ([f"{A}.clip_ratio_low=1.2"], ["clip_ratio_low=1.2", "at most 1"]),
        ([f"{A}.kl_loss_type=k4"], ["kl_loss_type=k4", "k3"]),
        ([f"{A}.kl_loss_coef=-1"], ["kl_loss_coef=-1", "at least 0"]),
        (["reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=9"], ["overlong_buffer.len=9", "max_response_length=8"]),
        (["reward.overlong_buffer.len=0"], ["overlong_buffer.len=0", "at least 1"]),
        ([f"{C}.rollout_is=geometric"], ["rollout_is=geometric", "null | token | sequence"]),
        ([f"{C}.preset=tis"], ["preset=tis", "token_tis"]),
        ([f"{C}.preset=seq_tis"], ["preset=seq_tis", "rollout_is=token", f"{C}.rollout_is=null"]),
        ([f"{C}.rollout_is_threshold=0"], ["rollout_is_threshold=0", "above 0"]),
        ([f"{C}.rollout_is_threshold=0.5-5"], ["rollout_is_threshold=0.5-5", "0.5_5.0"]),
        ([f"{C}.rollout_is_threshold=0.5_1_5"], ["rollout_is_threshold=0.5_1_5", "band"]),
        ([f"{C}.rollout_is_threshold=0.5_"], ["rollout_is_threshold=0.5_", "band"]),
        ([f"{C}.rollout_is_threshold=_5"], ["rollout_is_threshold=_5", "band"]),
        ([f"{C}.rollout_is_threshold=5_0.5"], ["rollout_is_threshold=5_0.5", "lower bound"]),
        ([f"{C}.rollout_is_threshold=nan"], ["rollout_is_threshold=nan", "above 0"]),
        ([f"{C}.rollout_is=null", f"{C}.rollout_is_batch_normalize=True"], ["rollout_is_batch_normalize=True", "rollout_is=null"]),
        ([f"{C}.rollout_rs=token_k1"], ["rollout_rs=token_k1", "rollout_rs_threshold"]),
        ([f"{C}.rollout_rs=seq_max_k1", f"{C}.rollout_rs_threshold=2"], ["seq_max_k1", "seq_max_k2"]),
        ([f"{C}.rollout_rs_threshold=2"], ["rollout_rs_threshold=2", "without", "rollout_rs"]),
        ([f"{C}.rollout_rs=token_k2", f"{C}.rollout_rs_threshold=0.5_2"], ["0.5_2", "token_k2", "one number"]),
        ([f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=0.5"], ["rollout_rs_threshold=0.5", "at least 1"]),
        ([f"{C}.rollout_rs='token_k1,token_k2,token_k3'", f"{C}.rollout_rs_threshold='2,3'"], ["2 values for 3 rules"]),
        ([f"{C}.rollout_rs=' , '", f"{C}.rollout_rs_threshold=2"], ["names no rule"]),
        ([f"{C}.loss_type=ppo"], ["loss_type=ppo", "ppo_clip | reinforce"]),
        ([f"{C}.loss_type=reinforce"], ["loss_type=reinforce", "bypass_mode=False", "ppo_clip"]),
        ([*REINFORCE, f"{A}.policy_loss.loss_mode=cispo"], ["loss_mode=cispo", "loss_type=reinforce", "vanilla"]),
        *[
            ([f"{C}.rollout_is=null", "psrl.log_prob.enable_rollout_engine_log_prob=False", *more], [word, "enable_rollout_engine_log_prob=False"])
            for word, more in {
                "rollout_is=sequence": [f"{C}.rollout_is=sequence"],
                "rollout_rs=token_k2": [f"{C}.rollout_rs=token_k2", f"{C}.rollout_rs_threshold=1"],
                "bypass_mode=True": [f"{C}.bypass_mode=True"],
                "preset=geo_rs": [f"{C}.preset=geo_rs"],
            }.items()
        ],
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{C}.rollout_is=null"], ["psrl.staleness=1", f"{C}.rollout_is=token", "enable_rollout_engine_log_prob=True"]),
        ([f"{C}.bypass_mode=True"], ["rollout_is=token", "bypass_mode=True"]),
        ([*REINFORCE, f"{C}.rollout_is=null"], ["loss_type=reinforce", "rollout_is=null", "weighs nothing"]),
        (["gen_actor_rollout_ref.rollout.top_p=0.9"], ["rollout.top_p=0.9", "biased", "top_p=1"]),
        (["gen_actor_rollout_ref.rollout.top_k=20"], ["rollout.top_k=20", "biased", "top_k=-1"]),
        ([f"{A}.policy_loss.loss_mode=gspo"], ["gspo", "seq-mean-token-mean"]),
        ([f"{A}.use_kl_loss=True", f"{A}.kl_loss_type=kl"], ["kl_loss_type=kl", "k2 or k3"]),
        ([f"{A}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"], ["use_kl_in_reward=True", "twice"]),
    ],
)  # fmt: skip
def test_what_is_doubtful_is_warned_about(overrides: list[str], words: list[str]) -> None:
    (warning,) = check(composed(*overrides))
    for word in words:
        assert word in warning


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{C}.rollout_is=null", f"{C}.preset=k3_rs"],
        REINFORCE,
        [f"{C}.preset=geo_rs"],  # beside the preset's token weights
        [f"{C}.rollout_is=sequence", f"{C}.rollout_is_batch_normalize=True", f"{C}.rollout_rs='token_k1,seq_max_k3'", f"{C}.rollout_rs_threshold='0.5_2.0,0.1'"],
        ["psrl.rollout_n=1", "algorithm.adv_estimator=reinforce_plus_plus", f"{A}.clip_ratio_c=null", f"{A}.clip_ratio_low=1.0"],
        [f"{A}.policy_loss.loss_mode=gspo", f"{A}.loss_agg_mode=seq-mean-token-mean", f"{A}.clip_ratio_low=3e-4", f"{A}.clip_ratio_high=4e-4"],
        [f"{A}.use_kl_loss=True", "reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=4"],
    ],
)  # fmt: skip
def test_what_can_be_is_accepted_without_a_word(overrides: list[str]) -> None:
    assert check(composed(*overrides)) == []


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (None, None, 2.0, ())),
        ({"preset": "token_tis"}, ("token", None, 2.0, ())),
        ({"preset": "seq_tis", "rollout_is_threshold": 5}, ("sequence", None, 5.0, ())),
        ({"preset": "seq_mis"}, ("sequence", None, 2.0, (ParsedRule("seq_sum_k1", 0.5, 2.0),))),
        ({"preset": "geo_rs"}, (None, None, 2.0, (ParsedRule("seq_mean_k1", 0.999, 1.001),))),
        ({"preset": "k3_rs"}, (None, None, 2.0, (ParsedRule("seq_mean_k3", None, 0.01),))),
        ({"preset": "k3_rs", "rollout_rs_threshold": 0.1}, (None, None, 2.0, (ParsedRule("seq_mean_k3", None, 0.1),))),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5"}, ("token", 0.5, 5.0, ())),
        ({"rollout_is": "token", "rollout_is_threshold": "3.5"}, ("token", None, 3.5, ())),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 4}, (None, None, 2.0, (ParsedRule("token_k1", 0.25, 4.0),))),
        (
            {"rollout_rs": "token_k2, seq_max_k3", "rollout_rs_threshold": "0.5"},
            (None, None, 2.0, (ParsedRule("token_k2", None, 0.5), ParsedRule("seq_max_k3", None, 0.5))),
        ),
    ],
)  # fmt: skip
def test_words_become_numbers(keys: dict, expected: tuple) -> None:
    level, low, high, rules = expected
    parsed = parse_correction(RolloutCorrectionConfig(**keys))
    assert parsed == ParsedCorrection(level, low, high, False, rules, False)


@pytest.mark.parametrize("value", ["0.5_5", "2_5", "0.5_5.0", "'0.5_5'"])
def test_a_band_on_the_command_line_is_never_read_as_one_number(value: str) -> None:
    """Python, YAML and Hydra all read 0.5_5 as 0.55 and 2_5 as 25."""
    config = composed(f"{C}.rollout_is_threshold={value}")
    low, high = (float(part) for part in value.strip("'").split("_"))
    parsed = parse_correction(config.algorithm.rollout_correction)
    assert (parsed.low, parsed.high) == (low, high)
    again = OmegaConf.to_object(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(config))))
    assert again["algorithm"]["rollout_correction"]["rollout_is_threshold"] == value.strip("'")


def test_a_sweep_over_bands_stays_a_sweep() -> None:
    (override,), _ = normalise([f"{C}.rollout_is_threshold=0.5_5,2.0"], has_accelerator=True, on_slurm=False)
    assert override == f"{C}.rollout_is_threshold='0.5_5',2.0"


def test_the_configuration_names_exactly_what_is_built() -> None:
    choices = algorithm_checks.CHOICES
    assert set(choices["algorithm.adv_estimator"]) == set(ESTIMATORS)
    assert set(choices[f"{A}.policy_loss.loss_mode"]) == set(POLICY_LOSSES)
    assert choices[f"{A}.loss_agg_mode"] == LOSS_AGG_MODES
    assert set(choices[f"{A}.kl_loss_type"]) == set(choices["algorithm.kl_penalty"]) == set(KL_TYPES)


def test_shipped_defaults() -> None:
    config = OmegaConf.to_object(
        compose_config(["preset=cluster", "data.train_files=/x.parquet", "psrl.rollout_n=8", "trainer.total_epochs=1"])
    )
    assert check_algorithm(config) == []
    actor, algorithm = config.train_actor_rollout_ref.actor, config.algorithm
    assert (actor.policy_loss.loss_mode, actor.loss_agg_mode, actor.clip_ratio_c) == ("vanilla", "token-mean", 3.0)
    assert (actor.entropy_coeff, actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (
        0.0,
        False,
        0.001,
        "low_var_kl",
    )
    assert (algorithm.gamma, algorithm.lam, algorithm.use_kl_in_reward, algorithm.kl_penalty) == (1.0, 1.0, False, "kl")
    assert vars(algorithm.kl_ctrl) == {"type": "fixed", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1}
    assert parse_correction(algorithm.rollout_correction) == ParsedCorrection(None, None, 2.0, False, (), False)


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "algorithm").glob("*.yaml")))
def test_every_shipped_algorithm_is_accepted(name: str) -> None:
    overrides = [f"algorithm={name}", "data.train_files=/x.parquet", "psrl.rollout_n=8", "trainer.total_epochs=1"]
    config = OmegaConf.to_object(compose_config(overrides))
    assert check(config) == []
    assert (name == "grpo") == (config == OmegaConf.to_object(compose_config(overrides[1:])))


def test_dapo_samples_dynamically() -> None:
    overrides = ["algorithm=dapo", "data.train_files=/x.parquet", "psrl.rollout_n=8", "trainer.total_epochs=1"]
    config = OmegaConf.to_object(compose_config(overrides))
    process, groups = config.psrl.group_post_process, config.algorithm.filter_groups
    assert (process.enable, process.name) == (True, "dynamic_sampling_filter")
    assert (groups.metric, groups.max_num_gen_batches) == ("seq_reward", 10)
    assert config.reward.overlong_buffer.enable


def test_keys_of_the_algorithm_may_be_set_beside_its_name() -> None:
    config = compose_config(
        [
            "task=chain_sum",
            "preset=laptop",
            "algorithm=dapo",
            "algorithm.adv_estimator=rloo",
            f"{A}.clip_ratio_high=0.3",
        ]
    )
    actor = config.train_actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, config.algorithm.adv_estimator) == (0.2, 0.3, "rloo")
    assert config.algorithm.rollout_correction.rollout_is == "token"  # of the laptop preset
