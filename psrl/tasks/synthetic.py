"""Two tasks without package or file: one that a tiny model learns in minutes, one with long-tailed responses."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from psrl.tasks.base import Answer, TaskItem, user_message
from psrl.tasks.verifiers import numeric_match


@dataclass(frozen=True, kw_only=True)
class DigitSum:
    """`12 + 7 =` with `terms` numbers of at most `digits` digits; reward 1 for the right number, else 0."""

    seed: int = 0
    size: int = 4096
    terms: int = 2
    digits: int = 1

    def __post_init__(self) -> None:
        _require(self.size >= 1 and self.terms >= 2 and self.digits >= 1, "size >= 1, terms >= 2 and digits >= 1", self)

    def items(self) -> Iterator[TaskItem]:
        rng = random.Random(self.seed)
        for _ in range(self.size):
            numbers = [rng.randrange(10**self.digits) for _ in range(self.terms)]
            total = str(sum(numbers))
            yield TaskItem(
                messages=user_message(f"{' + '.join(map(str, numbers))} ="),
                data_source="digit_sum",
                ground_truth=total,
                solution=total,
            )

    def score(self, answer: Answer) -> float:
        return numeric_match(answer.solution_str, answer.ground_truth)


@dataclass(frozen=True, kw_only=True)
class LongtailCount:
    """`Count: 12` wants `12,11,10, ... ,1`: the response is as long as the number is large.

    The starting numbers are lognormal, so that response lengths (in characters, which are the tiny model's tokens) have
    median `median_length` and most lie between 8 and 256, with the long tail that real rollouts have.
    Reward: the share of the wanted text that is right from its beginning; 1 only for exactly the text.
    """

    seed: int = 0
    size: int = 4096
    median_length: int = 40
    sigma: float = 0.8
    """Standard deviation of log(length); 0.8 puts the 95th percentile at 3.7 x the median."""
    min_length: int = 8
    max_length: int = 255

    def __post_init__(self) -> None:
        limits = 1 <= self.min_length <= self.median_length <= self.max_length
        _require(
            self.size >= 1 and limits and self.sigma >= 0,
            "1 <= min_length <= median_length <= max_length, sigma >= 0",
            self,
        )

    def items(self) -> Iterator[TaskItem]:
        rng = random.Random(self.seed)
        for _ in range(self.size):
            length = rng.lognormvariate(math.log(self.median_length), self.sigma)
            start = _count_of_length(min(max(length, self.min_length), self.max_length))
            yield TaskItem(
                messages=user_message(f"Count: {start}"),
                data_source="longtail_count",
                ground_truth=start,
                solution=countdown(start),
            )

    def score(self, answer: Answer) -> float:
        wanted, given = countdown(int(answer.ground_truth)), answer.solution_str.strip()
        if given == wanted:
            return 1.0
        right = next(
            (i for i, (a, b) in enumerate(zip(wanted, given, strict=False)) if a != b), min(len(wanted), len(given))
        )
        return min(right, len(wanted) - 1) / len(wanted)


def countdown(start: int) -> str:
    """`countdown(3) == "3,2,1"`."""
    return ",".join(str(i) for i in range(start, 0, -1))


def _count_of_length(length: float) -> int:
    """The smallest n whose countdown has at least `length` characters; `_count_of_length(5) == 3`."""
    n, characters = 1, 1
    while characters < length:
        n += 1
        characters += 1 + len(str(n))
    return n


def _require(condition: bool, rule: str, task: object) -> None:
    if not condition:
        raise ValueError(f"{task} is refused: allowed is {rule}")
