"""From the words of `algorithm.rollout_correction` to plain numbers. Pure; raises ConfigError for what cannot be read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from psrl.config.algorithm import RolloutCorrectionConfig
from psrl.config.errors import ConfigError

KEY = "algorithm.rollout_correction"
RULES = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
PRESETS: dict[str, dict[str, str | float]] = {
    "token_tis": {"rollout_is": "token"},
    "seq_tis": {"rollout_is": "sequence"},
    "seq_mis": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "geo_rs": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    "k3_rs": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
}


@dataclass(frozen=True, slots=True)
class ParsedRule:
    """`low` is None for k2 and k3, which only have an upper bound."""

    name: str
    low: float | None
    high: float


@dataclass(frozen=True, slots=True)
class ParsedCorrection:
    """The correction that a configuration comes to: `low` None truncates weights at `high`, else the band keeps them."""

    level: str | None
    low: float | None
    high: float
    batch_normalize: bool
    rules: tuple[ParsedRule, ...]
    bypass_mode: bool
    loss_type: str = "ppo_clip"

    @property
    def active(self) -> bool:
        """Whether anything is corrected at all."""
        return self.level is not None or bool(self.rules) or self.bypass_mode


def parse_correction(config: RolloutCorrectionConfig) -> ParsedCorrection:
    """Apply the preset and read the thresholds.

    `parse_correction(RolloutCorrectionConfig(preset="seq_mis")).rules == (ParsedRule("seq_sum_k1", 0.5, 2.0),)`
    """
    level = _with_preset(config, "rollout_is")
    low, high = _band(f"{KEY}.rollout_is_threshold", config.rollout_is_threshold)
    rules = _rules(_with_preset(config, "rollout_rs"), config)
    return ParsedCorrection(
        None if level is None else str(level),
        low,
        high,
        config.rollout_is_batch_normalize,
        rules,
        config.bypass_mode,
        config.loss_type,
    )


def _with_preset(config: RolloutCorrectionConfig, name: str) -> str | float | None:
    given: str | float | None = getattr(config, name)
    preset = PRESETS.get(config.preset or "", {}).get(name)
    if given is not None and preset is not None and given != preset and name != "rollout_rs_threshold":
        raise ConfigError(
            f"{KEY}.preset={config.preset} means {name}={preset} but {KEY}.{name}={given}: set {KEY}.{name}=null, or no preset."
        )
    return preset if given is None else given


def _rules(names: str | float | None, config: RolloutCorrectionConfig) -> tuple[ParsedRule, ...]:
    threshold = _with_preset(config, "rollout_rs_threshold")
    if names is None:
        if threshold is not None:
            raise ConfigError(f"{KEY}.rollout_rs_threshold={threshold} without {KEY}.rollout_rs: name the rule too.")
        return ()
    rules = list(dict.fromkeys(part.strip() for part in str(names).split(",") if part.strip()))
    for rule in rules:
        if rule not in RULES:
            raise ConfigError(f"{KEY}.rollout_rs={names} names {rule!r}: allowed is {' | '.join(RULES)}.")
    if not rules:
        raise ConfigError(f"{KEY}.rollout_rs={names!r} names no rule: allowed is {' | '.join(RULES)}, or null.")
    if threshold is None:
        raise ConfigError(
            f"{KEY}.rollout_rs={names} needs {KEY}.rollout_rs_threshold: a band such as 0.5_2.0 for k1, a largest value for k2 and k3."
        )
    values: list[str | float] = [threshold]
    if isinstance(threshold, str):
        values = [part.strip() for part in threshold.split(",")]
    if len(values) not in (1, len(rules)):
        raise ConfigError(
            f"{KEY}.rollout_rs_threshold={threshold} has {len(values)} values for {len(rules)} rules: give one, or one a rule."
        )
    if len(values) == 1:
        values = values * len(rules)
    return tuple(_rule(rule, value) for rule, value in zip(rules, values, strict=True))


def _rule(name: str, threshold: str | float) -> ParsedRule:
    key = f"{KEY}.rollout_rs_threshold"
    low, high = _band(key, threshold)
    if name.endswith("k1"):
        if low is None and high < 1:
            raise ConfigError(
                f"{key}={threshold} is refused for {name}: a single number C means 1/C_C, so C must be at least 1."
            )
        return ParsedRule(name, 1.0 / high if low is None else low, high)
    if low is not None:
        raise ConfigError(f"{key}={threshold} is refused for {name}: it has an upper bound only, so give one number.")
    return ParsedRule(name, None, high)


def _band(key: str, value: str | float) -> tuple[float | None, float]:
    """(None, C) of a number, (lo, hi) of "lo_hi"."""
    if not isinstance(value, str):
        numbers = [float(value)]
    else:
        try:
            numbers = [float(part) for part in value.split("_")]
        except ValueError:
            numbers = []
    if len(numbers) not in (1, 2) or not all(math.isfinite(n) and n > 0 for n in numbers):
        raise ConfigError(f"{key}={value} is refused: give a number above 0, or a band lo_hi such as 0.5_5.0.")
    if len(numbers) == 1:
        return None, numbers[0]
    if numbers[0] > numbers[1]:
        raise ConfigError(f"{key}={value} is refused: the lower bound of a band must not be above the upper one.")
    return numbers[0], numbers[1]
