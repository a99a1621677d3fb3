"""Advantages from rewards. Pure numpy: a group is a handful of floats, and every rank computes the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

MIN_VALID_SAMPLES = 2
"""A group's mean and spread need two rewards; with fewer there is nothing to compare with."""

STD_EPS = 1e-6
"""Added to the standard deviation, so that nearly equal rewards give large but finite advantages."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """`advantages` float64 [samples], 0 where not valid; `valid` bool [samples].

    `invalid_rewards` counts the rewards that were missing or not finite. `dropped`: fewer than two valid rewards,
    so no sample of the group may be trained (`valid` is all False then).
    """

    advantages: np.ndarray
    valid: np.ndarray
    invalid_rewards: int
    dropped: bool


def grpo_advantages(rewards: Sequence[float | None], norm_by_std: bool = True) -> GroupAdvantages:
    """Advantages of one prompt's samples relative to each other (GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 4).

    A_i = (r_i - mean(r)) / (std(r) + 1e-6) over the valid rewards, std with n - 1 in the denominator. With
    `norm_by_std=False` A_i = r_i - mean(r) (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). The value holds for
    every response token of sample i. Equal rewards give exactly 0.

    None, NaN and infinite rewards are left out of the statistics, masked and counted, never read as 0:
    `grpo_advantages([1, 0, None, 1])` has the advantages of [1, 0, 1] and `valid` [True, True, False, True].

    Raises TypeError for a reward that is not a number, such as the string "1".
    """
    values = np.array([_as_float(reward, position) for position, reward in enumerate(rewards)], dtype=np.float64)
    valid = np.isfinite(values)
    invalid = int(values.size - valid.sum())
    if values.size - invalid < MIN_VALID_SAMPLES:
        return GroupAdvantages(np.zeros_like(values), np.zeros_like(valid), invalid, dropped=True)
    kept = values[valid]
    advantages = np.zeros_like(values)
    if kept.min() < kept.max():  # equal rewards: exactly 0, whatever rounding does to their mean
        centred = kept - kept.mean()
        advantages[valid] = centred / (kept.std(ddof=1) + STD_EPS) if norm_by_std else centred
    return GroupAdvantages(advantages, valid, invalid, dropped=False)


def _as_float(reward: float | None, position: int) -> float:
    if reward is None:
        return math.nan
    if not isinstance(reward, Real):
        raise TypeError(
            f"grpo_advantages: reward {position} is {reward!r} ({type(reward).__name__}), not a number;"
            " a reward function must return a float, or None when it cannot score the sample"
        )
    return float(reward)
