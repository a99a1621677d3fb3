"""Keys of the learning algorithm: `algorithm`."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.config.coordination import FilterGroupsConfig


@dataclass
class RolloutCorrectionConfig:
    preset: str | None = None
    """Fills those of the keys below that are null: token_tis, seq_tis (truncated importance weights of tokens, sequences) |
    seq_mis (of sequences, those outside 0.5_2.0 rejected) | geo_rs (sequences whose mean ratio is outside 0.999_1.001
    rejected) | k3_rs (those whose mean k3 is above 0.01)."""
    rollout_is: str | None = None
    """Importance weights on the loss: null | token: each token's ratio of training to rollout policy | sequence: its product
    over the sequence."""
    rollout_is_threshold: float | int | str = 2.0
    """A number C: weights are at most C (truncated importance sampling). A band "lo_hi", for example 0.5_5.0: weights outside
    it become 0 (IcePop). In a YAML file put the band in quotes."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the buffer."""
    rollout_rs: str | None = None
    """Rejection: what is too far from the training policy is not trained at all. One rule, or several with commas between:
    token_k1, token_k2, token_k3 (each token), seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2, seq_max_k3 (whole sequences),
    with k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r of the ratio r."""
    rollout_rs_threshold: float | int | str | None = None
    """One threshold, or one a rule with commas between. For k1 the band "lo_hi" of the ratio (a number C means 1/C_C); for k2
    and k3 the largest value. In a YAML file put it in quotes."""
    bypass_mode: bool = False
    """True: the engine's log-probs are the old log-probs of the PPO ratio, which then corrects by itself; False: those of the
    training weights (decoupled)."""
    loss_type: str = "ppo_clip"
    """The loss of bypass mode: ppo_clip: the ratio to the engine's policy in actor.policy_loss.loss_mode, which corrects by itself |
    reinforce: -advantage x log-prob without any clip, weighted by rollout_is."""


@dataclass
class KLControlConfig:
    type: str = "fixed"
    """fixed | adaptive: the coefficient rises while the KL is above target_kl and falls while it is below."""
    kl_coef: float = 0.001
    """The coefficient, at the start if adaptive."""
    horizon: int = 10000
    """Samples over which the adaptive coefficient moves by a full relative error."""
    target_kl: float = 0.1
    """The KL that the adaptive coefficient aims at."""


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    """grpo: relative to the group | rloo: leave-one-out baseline | remax: a greedy sample as baseline |
    reinforce_plus_plus: normalised over the buffer | gae: with a critic (`critic.*`)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages by the group's standard deviation; False: Dr. GRPO."""
    gamma: float = 1.0
    """Discount of later rewards (gae, reinforce_plus_plus)."""
    lam: float = 1.0
    """Decay of GAE: 1 trusts the rewards, 0 the critic."""
    use_kl_in_reward: bool = False
    """Take the KL to the initial policy off the reward of each token; loads a frozen copy of the initial weights."""
    kl_penalty: str = "kl"
    """Its estimator: k1 or kl | abs | k2 or mse | k3 or low_var_kl."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass
class OverlongBufferConfig:
    enable: bool = False
    """Punish responses that come close to data.max_response_length (DAPO)."""
    len: int | None = None
    """The last tokens before the limit over which the punishment grows from 0 to penalty_factor; null: a fifth of
    data.max_response_length."""
    penalty_factor: float = 1.0
    """What a response of full length loses."""
