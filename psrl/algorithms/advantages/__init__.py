"""Advantage estimators by the name that `algorithm.adv_estimator` gives them, one file each."""

from psrl.algorithms.advantages.base import (
    AdvantageOptions,
    Advantages,
    Estimator,
    RewardedBatch,
    SampleRewards,
)
from psrl.algorithms.advantages.gae import gae
from psrl.algorithms.advantages.grpo import grpo
from psrl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from psrl.algorithms.advantages.remax import remax
from psrl.algorithms.advantages.rloo import rloo

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
    "gae": gae,
}

__all__ = [
    "ESTIMATORS",
    "AdvantageOptions",
    "Advantages",
    "Estimator",
    "RewardedBatch",
    "SampleRewards",
    "gae",
    "grpo",
    "reinforce_plus_plus",
    "remax",
    "rloo",
]
