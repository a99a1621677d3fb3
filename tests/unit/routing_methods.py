"""Every routing method, ready to use, and a fleet to try it on."""

from __future__ import annotations

from collections.abc import Callable

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

QWEN_7B = load_cost_model("qwen_7b", "TP1_PP1")
METHODS: dict[str, Callable[[], Router]] = {
    "random": lambda: Random(0),
    "round_robin": RoundRobin,
    "request_num_balance": RequestNumBalance,
    "throughput_optimal": lambda: ThroughputOptimal(QWEN_7B, 0.5),
    "throughput_optimal_with_budget": lambda: ThroughputOptimalWithBudget(QWEN_7B, 0.5),
    "cache_aware": lambda: CacheAware(CacheSettings()),
    "cache_aware_v1": lambda: CacheAwareV1(CacheSettings()),
}


def view(name: str, in_flight: int = 0, *, version: int = 0, room: int = 64, kv_usage: float = 0.0, **changes):
    """An instance that serves `version` and has room for `room` samples in all."""
    stats = EngineStats(running=in_flight, kv_usage=kv_usage, kv_capacity_tokens=100_000)
    return InstanceView(name, "", room, version=version, in_flight=in_flight, stats=stats, **changes)


def fleet_of(router: Router, *views: InstanceView, limit: int = 1024, reject_on_waiting: bool = True) -> Fleet:
    fleet = Fleet(router, limit=limit, reject_on_waiting=reject_on_waiting)
    for v in views:
        fleet.add(v)
    return fleet


def place(fleet: Fleet, work: Work, versions: list[int] | None = None, incarnation: int = 0) -> InstanceView | None:
    """Choose and put the work there, as the coordinator does."""
    versions = fleet.versions(incarnation) if versions is None else versions
    chosen = fleet.choose(work, incarnation, versions)
    if chosen is not None:
        chosen.in_flight += work.num_samples
        chosen.placed_tokens += work.weight
        fleet.router.placed(chosen, work)
    return chosen
