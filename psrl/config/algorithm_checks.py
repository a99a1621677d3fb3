"""What `algorithm` and the losses of `actor` cannot be combined with, and what is allowed but doubtful. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psrl.config.correction import PRESETS, ParsedCorrection, parse_correction
from psrl.config.errors import ConfigError

if TYPE_CHECKING:
    from psrl.config.schema import Config

ACTOR = "train_actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
ESTIMATORS = ("grpo", "gae", "reinforce_plus_plus", "rloo", "remax")
KL_TYPES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
GROUP_ESTIMATORS = ("grpo", "rloo")
"""They compare the samples of one prompt, so a group needs two."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    "algorithm.kl_penalty": KL_TYPES,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    f"{CORRECTION}.preset": (None, *PRESETS),
    f"{CORRECTION}.rollout_is": (None, "token", "sequence"),
    f"{CORRECTION}.loss_type": ("ppo_clip", "reinforce"),
    f"{ACTOR}.policy_loss.loss_mode": ("vanilla", "gspo", "cispo"),
    f"{ACTOR}.loss_agg_mode": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    f"{ACTOR}.kl_loss_type": KL_TYPES,
}
AT_LEAST: dict[str, float] = {
    "algorithm.gamma": 0,
    "algorithm.lam": 0,
    "algorithm.kl_ctrl.kl_coef": 0,
    "algorithm.kl_ctrl.horizon": 1,
    f"{ACTOR}.kl_loss_coef": 0,
    "reward.overlong_buffer.len": 1,
    "reward.overlong_buffer.penalty_factor": 0,
}
POSITIVE = (f"{ACTOR}.clip_ratio", "algorithm.kl_ctrl.target_kl")
AT_MOST: dict[str, float] = {"algorithm.gamma": 1, "algorithm.lam": 1}


def least_valid_samples(adv_estimator: str) -> int:
    """Rewarded samples without which a group teaches nothing: `least_valid_samples("grpo") == 2`."""
    return 2 if adv_estimator in GROUP_ESTIMATORS else 1


def greedy_samples(adv_estimator: str) -> int:
    """Samples of a group that are made without randomness, beside `psrl.rollout_n`: the baseline of remax."""
    return 1 if adv_estimator == "remax" else 0


def needs_reference(config: Config) -> bool:
    """Whether the log-probs of the initial policy are needed."""
    return config.train_actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def check_algorithm(config: Config) -> list[str]:
    """Refuse what cannot be (ConfigError, one sentence); return warnings."""
    correction = parse_correction(config.algorithm.rollout_correction)
    _check_estimator(config)
    _check_correction(config, correction)
    _check_losses(config)
    _check_overlong(config)
    return [*_correction_warnings(config, correction), *_loss_warnings(config)]


def _check_estimator(config: Config) -> None:
    estimator, n = config.algorithm.adv_estimator, config.psrl.rollout_n
    if n < least_valid_samples(estimator):
        raise ConfigError(
            f"psrl.rollout_n={n} with algorithm.adv_estimator={estimator} gives no advantage: a group needs at least 2 samples; "
            "raise psrl.rollout_n, or use algorithm.adv_estimator=reinforce_plus_plus."
        )
    for key, most in AT_MOST.items():
        value = getattr(config.algorithm, key.rpartition(".")[2])
        if value > most:
            raise ConfigError(f"{key}={value} is refused: it must be at most {most:g}.")


def _check_correction(config: Config, correction: ParsedCorrection) -> None:
    settings = config.algorithm.rollout_correction
    if correction.active and not config.psrl.log_prob.enable_rollout_engine_log_prob:
        off = {"preset": "null", "rollout_is": "null", "rollout_rs": "null", "bypass_mode": "False"}
        name = next(name for name in off if getattr(settings, name))
        raise ConfigError(
            f"{CORRECTION}.{name}={getattr(settings, name)} needs the engine's log-probs but "
            f"psrl.log_prob.enable_rollout_engine_log_prob=False: set it to True, or set {CORRECTION}.{name} to {off[name]}."
        )
    if correction.batch_normalize and correction.level is None:
        raise ConfigError(
            f"{CORRECTION}.rollout_is_batch_normalize=True but {CORRECTION}.rollout_is=null has no weights to normalise: set rollout_is "
            "to token or sequence."
        )
    if correction.loss_type == "reinforce":
        _check_reinforce(config)


def _check_reinforce(config: Config) -> None:
    if not config.algorithm.rollout_correction.bypass_mode:
        raise ConfigError(
            f"{CORRECTION}.loss_type=reinforce is a loss of bypass mode but {CORRECTION}.bypass_mode=False: set it to True, or "
            "use loss_type=ppo_clip."
        )
    loss_mode = config.train_actor_rollout_ref.actor.policy_loss.loss_mode
    if loss_mode != "vanilla":
        raise ConfigError(
            f"{ACTOR}.policy_loss.loss_mode={loss_mode} has no meaning with {CORRECTION}.loss_type=reinforce: leave it at vanilla, or "
            "use loss_type=ppo_clip."
        )


def _check_losses(config: Config) -> None:
    actor = config.train_actor_rollout_ref.actor
    if actor.clip_ratio_c is not None and actor.clip_ratio_c <= 1:
        raise ConfigError(
            f"{ACTOR}.clip_ratio_c={actor.clip_ratio_c} is refused: the dual clip must be greater than 1 (null switches it off)."
        )
    for name in ("clip_ratio_low", "clip_ratio_high", "loss_scale_factor"):
        value = getattr(actor, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{ACTOR}.{name}={value} is refused: it must be greater than 0, or null.")
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    if low > 1:
        name = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
        raise ConfigError(
            f"{ACTOR}.{name}={low} is refused: a ratio is never negative, so the range below 1 is at most 1 (clip_ratio_high may be more)."
        )


def _check_overlong(config: Config) -> None:
    overlong = config.reward.overlong_buffer
    if overlong.enable and (overlong.len or 0) > config.data.max_response_length:
        raise ConfigError(
            f"reward.overlong_buffer.len={overlong.len} is longer than data.max_response_length={config.data.max_response_length}: "
            "make it a part of the response."
        )


def _correction_warnings(config: Config, correction: ParsedCorrection) -> list[str]:
    warnings = []
    if config.psrl.staleness > 0 and not correction.active:
        warnings.append(
            f"psrl.staleness={config.psrl.staleness} without any correction: the data comes from older policies; "
            f"consider {CORRECTION}.rollout_is=token with psrl.log_prob.enable_rollout_engine_log_prob=True."
        )
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and correction.level is not None:
        warnings.append(
            f"{CORRECTION}.rollout_is={correction.level} weighs nothing with {CORRECTION}.bypass_mode=True: the ratio of the loss corrects "
            "already."
        )
    rollout = config.gen_actor_rollout_ref.rollout
    for name, value, cut in (("top_p", rollout.top_p, rollout.top_p < 1), ("top_k", rollout.top_k, rollout.top_k > 0)):
        if cut and correction.active:
            warnings.append(
                f"gen_actor_rollout_ref.rollout.{name}={value} samples from a part of the distribution, which the policy that trains "
                f"knows nothing of: the ratios of {CORRECTION} are biased; use top_p=1 and top_k=-1."
            )
    if correction.loss_type == "reinforce" and correction.level is None:
        warnings.append(
            f"{CORRECTION}.loss_type=reinforce with {CORRECTION}.rollout_is=null weighs nothing: data of older policies counts like "
            "new; consider rollout_is=token."
        )
    return warnings


def _loss_warnings(config: Config) -> list[str]:
    actor = config.train_actor_rollout_ref.actor
    warnings = []
    if actor.policy_loss.loss_mode == "gspo" and actor.loss_agg_mode != "seq-mean-token-mean":
        warnings.append(
            f"{ACTOR}.policy_loss.loss_mode=gspo with {ACTOR}.loss_agg_mode={actor.loss_agg_mode}: its paper uses seq-mean-token-mean."
        )
    if actor.use_kl_loss and actor.kl_loss_type in ("k1", "kl"):
        warnings.append(
            f"{ACTOR}.kl_loss_type={actor.kl_loss_type} as a loss has a gradient of mean zero and holds nothing back: use k2 or k3."
        )
    if actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        warnings.append(
            f"{ACTOR}.use_kl_loss=True and algorithm.use_kl_in_reward=True: the KL to the initial policy counts twice."
        )
    return warnings
