"""How long the answers that trained were, against all that were launched. Pure.

Redundancy, filters and truncation favour short answers: a step time alone would praise them for it. The coordinator
counts how every launched sample ended (psrl.rollout.sample_ends) and what it had by then; the counts are in each row of
the metrics as `rollout/samples/<kind>` and `rollout/response_tokens/<kind>`, growing from each coordinator's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.telemetry.metrics import Row

COMPLETE = ("consumed", "unused", "filtered", "failed")
"""Ends of samples that finished by themselves: their length is the answer's."""
CENSORED = ("truncated", "redundant", "returned")
"""Ends of samples that were cut short: the answer would have been longer."""
SAMPLES, TOKENS = "samples/", "response_tokens/"


@dataclass(frozen=True, slots=True)
class Ends:
    """`count` samples with `tokens` response tokens together."""

    count: int = 0
    tokens: int = 0

    @property
    def mean(self) -> float | None:
        return self.tokens / self.count if self.count else None

    def __add__(self, other: Ends) -> Ends:
        return Ends(self.count + other.count, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class Population:
    """Ends by kind."""

    kinds: Mapping[str, Ends]

    def of(self, *kinds: str) -> Ends:
        return sum((self.kinds.get(kind, Ends()) for kind in kinds), Ends())

    def __add__(self, other: Population) -> Population:
        return Population({kind: self.of(kind) + other.of(kind) for kind in (*COMPLETE, *CENSORED)})

    def figures(self) -> dict[str, float]:
        """Means in tokens, those that are known. `at_least` is the mean over all ends, each with what it had: the whole
        population's mean is no less, whatever was cut short."""
        complete, censored = self.of(*COMPLETE), self.of(*CENSORED)
        means = {
            "consumed": self.of("consumed").mean,
            "complete": complete.mean,
            "censored": censored.mean,
            "at_least": (complete + censored).mean,
        }
        return {name: mean for name, mean in means.items() if mean is not None}


def population_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> Population:
    """What ended between two looks at the counters; fewer than before: a new coordinator has begun to count.

    >>> seen = {"samples/consumed": 2, "response_tokens/consumed": 10}
    >>> population_between(seen, {"samples/consumed": 3, "response_tokens/consumed": 17}).of("consumed")
    Ends(count=1, tokens=7)
    """
    anew = any(now.get(SAMPLES + kind, 0) < before.get(SAMPLES + kind, 0) for kind in (*COMPLETE, *CENSORED))
    start: Mapping[str, Any] = {} if anew else before

    def grown(name: str) -> int:
        return int(now.get(name, 0)) - int(start.get(name, 0))

    return Population({kind: Ends(grown(SAMPLES + kind), grown(TOKENS + kind)) for kind in (*COMPLETE, *CENSORED)})


def population_metrics(before: Mapping[str, int], now: Mapping[str, int], step_s: float) -> dict[str, float]:
    """Of one step: mean lengths of what ended in it, the share that was cut short, and tokens a second of all of it."""
    population = population_between(before, now)
    ended = population.of(*COMPLETE, *CENSORED)
    if not ended.count:
        return {}
    row = {f"rollout/mean_length/{name}": mean for name, mean in population.figures().items()}
    row["rollout/censored_ratio"] = population.of(*CENSORED).count / ended.count
    if step_s > 0:
        row["rollout/ended_tokens_per_s"] = ended.tokens / step_s
    return row


def run_population(rows: Sequence[Row]) -> Population:
    """What ended in the whole run, from the counters in its rows."""
    total = Population({})
    before: Row = {}
    for row in rows:
        now = {name.removeprefix("rollout/"): value for name, value in row.items() if name.startswith("rollout/")}
        total, before = total + population_between(before, now), now
    return total


def describe(population: Population) -> str:
    """For the report, in words."""
    consumed, complete, censored = population.of("consumed"), population.of(*COMPLETE), population.of(*CENSORED)
    if not complete.count:
        return "No sample has ended yet."
    words = f"{consumed.count} samples were consumed"
    words += f", {consumed.mean:.1f} tokens long on average" if consumed.mean is not None else ""
    words += f"; all {complete.count} that finished by themselves, {complete.mean:.1f}."
    if not censored.count:
        return f"{words} None was cut short."
    least = population.figures()["at_least"]
    return (
        f"{words} {censored.count} more were cut short at {censored.mean:.1f} tokens on average, so the mean length of "
        f"all that was launched is at least {least:.1f}."
    )
