"""Which finished groups are not worth training on: pure checks of what scoring has said.

Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): a group whose samples all score alike has no
advantage anywhere, so it is dropped and replaced before it takes a place in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

REWARD_NAMES = ("seq_reward", "score")
METRIC_KEY = "algorithm.filter_groups.metric"


class MissingMetricError(Exception):
    """The reward function does not return the key that the filter goes by: a mistake that no retry cures."""


class Scored(Protocol):
    reward: float | None
    metrics: dict[str, float]


def without_signal(metric: str, scores: Sequence[Scored]) -> str | None:
    """Why the group of these samples is dropped, in words; None: keep it. Samples without a reward are passed over.

    Raises MissingMetricError when a sample has a reward but not `metric`.
    """
    values = [_value(metric, score) for score in scores if score.reward is not None]
    if len(set(values)) > 1:
        return None
    return f"{metric} is {values[0]:g} for all {len(values)} samples" if values else f"no sample has {metric}"


Filter = Callable[[Sequence[Scored]], str | None]


def make_filter(name: str, metric: str) -> Filter:
    """The filter `psrl.group_post_process.name` with `algorithm.filter_groups.metric`."""
    if name == "dynamic_sampling_filter":
        return partial(without_signal, metric)
    raise ValueError(f"psrl.group_post_process.name={name} is no filter")


def _value(metric: str, score: Scored) -> float:
    if metric in REWARD_NAMES:
        assert score.reward is not None  # the caller has left out those without
        return score.reward
    if metric not in score.metrics:
        beside = ", ".join(sorted(score.metrics)) or "nothing"
        raise MissingMetricError(
            f"{METRIC_KEY}={metric} is not among what reward.function returns beside the score ({beside}): return a "
            f'mapping with "score" and "{metric}" (a finite number), or use {METRIC_KEY}=seq_reward'
        )
    return score.metrics[metric]
