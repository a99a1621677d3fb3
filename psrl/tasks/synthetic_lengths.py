"""Response lengths that are drawn instead of sampled: a benchmark's work, the same in every setting whatever the model says. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psrl.config.schema import Config


def drawn_length(seed: int, *, mean: float, sigma: float, most: int) -> int:
    """Tokens of the response whose sample has this seed: lognormal with this mean (before the cut at `most`) and standard
    deviation `sigma` of its logarithm, in [1, most]. Every seed below 2^62 gives one length, always the same.

    >>> drawn_length(1, mean=100, sigma=0.0, most=1000), drawn_length(1, mean=100, sigma=0.0, most=50)
    (100, 50)
    """
    length = random.Random(seed).lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return min(most, max(1, round(length)))


def response_budget(config: Config) -> Callable[[int], int]:
    """Most tokens of a response by its sample's seed: the drawn length, or data.max_response_length where none are drawn."""
    most, drawn = config.data.max_response_length, config.data.synthetic_lengths
    if drawn.mean_tokens is None:
        return lambda seed: most
    return partial(drawn_length, mean=drawn.mean_tokens, sigma=drawn.sigma, most=most)
