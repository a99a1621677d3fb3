"""Which samples of a group may be trained, and what their rewards are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """`rewards` float64 [samples], 0 where not valid; `valid` bool [samples]. `baseline`: reward of the greedy sample, if there is
    one."""

    rewards: np.ndarray
    valid: np.ndarray
    baseline: float | None = None


def group_rewards(rewards: Sequence[float | None], least_valid: int) -> GroupRewards:
    """None, NaN and infinite rewards are not valid, never read as 0; in a group with fewer than `least_valid` others no sample is.
    `group_rewards([1, 0, None], 2).valid` is [True, True, False].

    Raises TypeError for a reward that is not a number, such as the string "1".
    """
    values = np.array([_as_float(reward, position) for position, reward in enumerate(rewards)], dtype=np.float64)
    valid = np.isfinite(values)
    if valid.sum() < least_valid:
        valid = np.zeros_like(valid)
    return GroupRewards(np.where(valid, values, 0.0), valid)


def _as_float(reward: float | None, position: int) -> float:
    if reward is None:
        return math.nan
    if not isinstance(reward, Real):
        raise TypeError(
            f"reward {position} of a group is {reward!r} ({type(reward).__name__}), not a number;"
            " a reward function must return a float, or None when it cannot score the sample"
        )
    return float(reward)
