"""What a reward that an agent or an environment returned is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from psrl.agents.base import Ending


class WrongRewardError(Exception):
    """No finite number, and not None either. Says which."""


def finite_reward(value: Any) -> float | None:
    """The number, or None for None. A NaN would poison its whole group, and a text is no reward: both are refused.

    >>> finite_reward(True)
    1.0
    """
    if value is None:
        return None
    if not isinstance(value, Real):
        raise WrongRewardError(f"the reward {value!r:.80} is of type {type(value).__name__}, not a number")
    reward = float(value)
    if not math.isfinite(reward):
        raise WrongRewardError(f"the reward is {reward}")
    return reward


def finite_metrics(figures: Mapping[str, Any]) -> dict[str, float]:
    """Those of `figures` that are finite numbers.

    >>> finite_metrics({"turns": 3, "note": "x", "ratio": float("nan")})
    {'turns': 3.0}
    """
    return {str(k): float(v) for k, v in figures.items() if isinstance(v, Real) and math.isfinite(v)}


def ending_of(value: Any) -> Ending:
    """What an agent returned: None (the task's verifier scores), a number, or {"score": ..., any figures}.

    >>> ending_of({"score": 1, "edits": 2})
    Ending(reward=1.0, metrics={'edits': 2.0}, failed='')
    """
    figures: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(value, Mapping) and "score" not in value:
        return Ending(failed=f'the agent returned {value!r:.80}: a mapping needs "score", a number or null')
    try:
        reward = finite_reward(figures["score"] if isinstance(value, Mapping) else value)
    except WrongRewardError as error:
        return Ending(failed=str(error))
    return Ending(reward, finite_metrics({k: v for k, v in figures.items() if k != "score"}))
