"""Decode steps of a real engine, timed over a grid of batch sizes and sequence lengths.

Other work on the machine comes and goes, so the grid is walked several times, each time in another order, and the median
counts: a slow minute then costs every point one visit and no point its value.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from psrl.protocol.generation import GenerateRequest, SampleRequest, SamplingParams

if TYPE_CHECKING:
    from psrl.rollout.engines.base import Engine

WARM_UP_STEPS = 2
"""Decode steps after the prefill that are not timed."""
SAMPLES_PER_PROMPT = 8
_PROMPT_VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class GridPoint:
    """`num_seqs` sequences whose prompts have `tokens_per_seq` tokens each."""

    num_seqs: int
    tokens_per_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Medians over the steps of one visit: seconds by two clocks, and the KV tokens of the middle step."""

    kv_tokens: float
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    point: GridPoint
    kv_tokens: float
    wall_s: float
    cpu_s: float
    """Processor time of all threads of this process."""


class MeasureError(RuntimeError):
    """The engine did not decode the grid point as asked; one sentence."""


def grid(nums_seqs: Sequence[int], tokens_per_seq: Sequence[int]) -> list[GridPoint]:
    return [GridPoint(n, tokens) for n in sorted(set(nums_seqs)) for tokens in sorted(set(tokens_per_seq))]


def visiting_orders(points: Sequence[GridPoint], repeats: int, seed: int) -> Iterator[list[GridPoint]]:
    """`repeats` orders of all points."""
    rng = random.Random(seed)
    for _ in range(repeats):
        yield rng.sample(list(points), len(points))


def measure(
    engine: Engine,
    points: Sequence[GridPoint],
    *,
    repeats: int,
    steps: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Measurement]:
    """Time `steps` decode steps at each point, `repeats` times in changing order. The engine must hold no request."""
    visits: dict[GridPoint, list[Visit]] = {point: [] for point in points}
    _visit(engine, points[0], steps)  # allocations and lazy initialisation, not timed
    for order in visiting_orders(points, repeats, seed):
        for point in order:
            visits[point].append(_visit(engine, point, steps))
            progress(sum(map(len, visits.values())), repeats * len(points))
    return [_summary(point, visits[point]) for point in points]


def _summary(point: GridPoint, visits: Sequence[Visit]) -> Measurement:
    return Measurement(
        point=point,
        kv_tokens=median(v.kv_tokens for v in visits),
        wall_s=median(v.wall_s for v in visits),
        cpu_s=median(v.cpu_s for v in visits),
    )


def requests(point: GridPoint, max_new_tokens: int) -> list[GenerateRequest]:
    """The sequences of a grid point in groups of one prompt, as a rollout has them: a group is prefilled once, which makes
    a visit short; each of its sequences attends over all its own tokens all the same."""
    return [
        GenerateRequest(
            group=first,
            min_version=-1,
            incarnation=0,
            prompt_ids=tuple(random.Random(first).choices(range(_PROMPT_VOCABULARY), k=point.tokens_per_seq)),
            sampling=SamplingParams(ignore_eos=True),
            samples=tuple(
                SampleRequest(sample=i, max_new_tokens=max_new_tokens, seed=first + i)
                for i in range(min(SAMPLES_PER_PROMPT, point.num_seqs - first))
            ),
        )
        for first in range(0, point.num_seqs, SAMPLES_PER_PROMPT)
    ]


def _visit(engine: Engine, point: GridPoint, steps: int) -> Visit:
    for request in requests(point, most_new_tokens(point, steps)):
        engine.submit(request)
    try:
        timed = _timed_steps(engine, point, steps)
    finally:
        engine.abort()
    return Visit(
        kv_tokens=median(kv for kv, _, _ in timed),
        wall_s=median(wall for _, wall, _ in timed),
        cpu_s=median(cpu for _, _, cpu in timed),
    )


def most_new_tokens(point: GridPoint, steps: int) -> int:
    """Budget of a sequence: the timed steps, warm-up, and as many while other sequences are still prefilled."""
    return WARM_UP_STEPS + steps + point.num_seqs + 1


def _timed_steps(engine: Engine, point: GridPoint, steps: int) -> list[tuple[float, float, float]]:
    """(KV tokens, wall s, processor s) of `steps` steps in which every sequence decoded one token and none prefilled."""
    held = (
        point.num_seqs * point.tokens_per_seq
    )  # the token that a step feeds in counts: the step writes its KV and attends over it
    timed: list[tuple[float, float, float]] = []
    full = 0
    while len(timed) < steps:
        wall, cpu = time.perf_counter(), time.process_time()
        chunks = engine.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        made = sum(len(chunk.token_ids) for chunk in chunks)
        full = full + 1 if made == point.num_seqs else 0
        if full > WARM_UP_STEPS:
            timed.append((held, wall, cpu))
        held += made
        if any(chunk.finish for chunk in chunks) or not engine.has_work():
            raise MeasureError(
                f"The engine cannot decode {point.num_seqs} sequences of {point.tokens_per_seq} tokens at the same time: "
                "ask for a smaller grid."
            )
    return timed
