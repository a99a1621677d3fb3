"""Which instance takes the next samples: pure choices behind one protocol.

A method sees only instances that may take the work (not leaving, weights of this incarnation, room left); what "may" means
is `eligible`, the same for every method.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from psrl.coordinator.views import InstanceView


class Router(Protocol):
    def choose(self, candidates: Sequence[InstanceView], num_samples: int) -> InstanceView:
        """One of `candidates` (never empty) for `num_samples` samples of one group."""
        ...


class RequestNumBalance:
    """The instance with the fewest samples in flight; equal ones by newer weights, then by name.

    >>> a, b = InstanceView("a", "", 8, in_flight=3), InstanceView("b", "", 8, in_flight=1)
    >>> RequestNumBalance().choose([a, b], 4).name
    'b'
    """

    def choose(self, candidates: Sequence[InstanceView], num_samples: int) -> InstanceView:
        return min(candidates, key=lambda i: (i.in_flight, -i.version, i.name))


class RoundRobin:
    """Each instance in turn, by name."""

    def __init__(self) -> None:
        self.last = ""

    def choose(self, candidates: Sequence[InstanceView], num_samples: int) -> InstanceView:
        ordered = sorted(candidates, key=lambda i: i.name)
        chosen = next((i for i in ordered if i.name > self.last), ordered[0])
        self.last = chosen.name
        return chosen


class Random:
    """Any, uniformly; the same seed gives the same sequence."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, candidates: Sequence[InstanceView], num_samples: int) -> InstanceView:
        return self.random.choice(sorted(candidates, key=lambda i: i.name))


def make_router(method: str, seed: int) -> Router:
    if method == "request_num_balance":
        return RequestNumBalance()
    if method == "round_robin":
        return RoundRobin()
    if method == "random":
        return Random(seed)
    raise ValueError(f"psrl.rollout_coordination.routing_strategy.method={method} has no router")


def eligible(
    instances: Iterable[InstanceView],
    *,
    incarnation: int,
    num_samples: int,
    min_version: int,
    limit: int,
    reject_on_waiting: bool,
) -> list[InstanceView]:
    """Instances that may take `num_samples` more samples of a group whose version is `min_version`."""
    return [
        i
        for i in instances
        if not i.leaving
        and i.incarnation == incarnation
        and i.version >= max(min_version, 0)
        and not i.draining
        and i.in_flight + num_samples <= min(limit, i.max_concurrent)
        and not (reject_on_waiting and i.stats.waiting > 0)
    ]
