"""What one routing decision costs, by method and size of the fleet.

    python benchmarks/routing.py [--decisions 3000]

Prints each 99th percentile beside its limit; exit status 1 if one is missed.

A decision is everything that routing does for one sample: taking in what changed since the last one (a sample ended
somewhere, another instance reported), choosing, remembering the choice. Processor time of this thread, so that a busy
machine does not count. The prompts share an opening that every instance comes to hold, which is the worst case for the
cache-aware methods.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

import numpy as np
from report_machine import describe_machine

from psrl.coordinator.routing.base import Router, Work
from psrl.coordinator.routing.cache_aware import CacheAware
from psrl.coordinator.routing.cache_aware_v1 import CacheAwareV1
from psrl.coordinator.routing.cache_settings import CacheSettings
from psrl.coordinator.routing.fleet import Fleet
from psrl.coordinator.routing.random_choice import Random
from psrl.coordinator.routing.request_num_balance import RequestNumBalance
from psrl.coordinator.routing.round_robin import RoundRobin
from psrl.coordinator.routing.throughput_optimal import ThroughputOptimal, ThroughputOptimalWithBudget
from psrl.coordinator.views import InstanceView
from psrl.cost_model.files import load_cost_model
from psrl.protocol.generation import EngineStats

MODEL = load_cost_model("qwen_7b", "TP1_PP1")
METHODS: dict[str, Callable[[], Router]] = {
    "random": lambda: Random(0),
    "round_robin": RoundRobin,
    "request_num_balance": RequestNumBalance,
    "throughput_optimal": lambda: ThroughputOptimal(MODEL, 0.0),
    "throughput_optimal_with_budget": lambda: ThroughputOptimalWithBudget(MODEL, 0.0),
    "cache_aware": lambda: CacheAware(CacheSettings()),
    "cache_aware_v1": lambda: CacheAwareV1(CacheSettings()),
}
LIMIT_MS = {10: None, 100: None, 1000: 1.0, 10_000: 5.0}
"""What the 99th percentile has to stay below."""
PROMPTS, SHARED_BLOCKS, OWN_BLOCKS = 500, 4, 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=3000, help="measured, for each method and size")
    args = parser.parse_args()
    print(f"{args.decisions} decisions each, processor time in ms: median / 99th percentile (limit of the latter)\n")
    print(f"{'method':31}" + "".join(f"{n:>23,}" for n in LIMIT_MS))
    within = True
    for method, make in METHODS.items():
        row = f"{method:31}"
        for size, limit in LIMIT_MS.items():
            p50, p99 = np.percentile(decisions_ms(make(), size, args.decisions), (50, 99))
            within = within and (limit is None or p99 < limit)
            row += f"{p50:>9.4f} / {p99:.4f}" + (f" ({limit:g})" if limit else " " * 4)
        print(row, flush=True)
    print(f"\n{'all within' if within else 'NOT within'} the limits\n{describe_machine()}")
    return 0 if within else 1


def decisions_ms(router: Router, size: int, count: int) -> list[float]:
    """Milliseconds of `count` decisions on a fleet of two versions, half loaded, after as many that warm it up."""
    rng = random.Random(size)
    views = [
        InstanceView(f"i{k}", "", 256, version=rng.randrange(2), in_flight=rng.randrange(128)) for k in range(size)
    ]
    fleet = Fleet(router, limit=1024, reject_on_waiting=True)
    for view in views:
        view.placed_tokens = 2000.0 * view.in_flight
        fleet.add(view)
    for view in views:
        router_sees_shared_prompt(fleet, router, view)
    spent = []
    for _ in range(2 * count):
        one, other = rng.choice(views), rng.choice(views)
        if one.in_flight:
            one.in_flight -= 1
        other.stats = EngineStats(running=other.in_flight, kv_usage=rng.random() * 0.8, kv_capacity_tokens=400_000)
        work = Work(1, 256.0 + rng.randrange(4000), 800.0, blocks_of(rng.randrange(PROMPTS)))
        begun = time.thread_time_ns()
        chosen = fleet.choose(work, 0, fleet.versions(0))
        assert chosen is not None
        chosen.in_flight += 1
        chosen.placed_tokens += work.weight
        router.placed(chosen, work)
        spent.append((time.thread_time_ns() - begun) / 1e6)
    return spent[count:]


def blocks_of(prompt: int) -> tuple[int, ...]:
    own = range(1000 * (prompt + 1), 1000 * (prompt + 1) + OWN_BLOCKS)
    return (*range(SHARED_BLOCKS), *own)


def router_sees_shared_prompt(fleet: Fleet, router: Router, view: InstanceView) -> None:
    fleet.versions(0)
    router.placed(view, Work(blocks=tuple(range(SHARED_BLOCKS))))


if __name__ == "__main__":
    sys.exit(main())
