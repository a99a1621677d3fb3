"""A moved sample waits for its keys and values and no longer; everything else goes straight to the engine."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from psrl.protocol.generation import (
    FINISH_ABORT,
    CacheEvents,
    EngineStats,
    GenerateRequest,
    SampleRequest,
    SamplingParams,
    TokenChunk,
)
from psrl.rollout.cache_identity import cache_identity
from psrl.rollout.engines.requests import last_chunk
from psrl.rollout.lmcache_engine import TransferCounts, TransferringEngine
from psrl.rollout.lmcache_messages import PullEnd, PullOrder
from psrl.rollout.lmcache_orders import WorkerOrders
from psrl.rollout.worker_puller import Workers

pytestmark = pytest.mark.unit


class FakeEngine:
    def __init__(self) -> None:
        self.version, self.on_gpu = 3, True
        self.submitted: list[tuple[int, int]] = []

    def submit(self, request: GenerateRequest) -> None:
        self.submitted += [(request.group, sample.sample) for sample in request.samples]

    def step(self) -> list[TokenChunk]:
        return []

    def abort(self, groups: Any = None) -> list[TokenChunk]:
        return [last_chunk(g, s, "stop") for g, s in self.submitted if groups is None or g in groups]

    def abort_samples(self, samples: Any) -> list[TokenChunk]:
        return [last_chunk(g, s, "stop") for g, s in self.submitted if (g, s) in samples]

    def has_work(self) -> bool:
        return bool(self.submitted)

    def waitables(self) -> list[int]:
        return [1]

    def due_in_s(self) -> float:
        return float("inf")

    def cache_events(self) -> CacheEvents:
        return CacheEvents(removed=[1])

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.submitted))

    def update_weights(self, version: int, tensors: Any) -> None:
        self.version = version

    def call_workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return [method]

    def sleep(self) -> None:
        self.version = -1


class FakeWakeup:
    def waitables(self) -> list[int]:
        return [2]


class FakeOrders:
    def __init__(self) -> None:
        self.ordered: list[PullOrder] = []
        self.ends: list[PullEnd] = []
        self.wakeup = FakeWakeup()

    def order(self, order: PullOrder) -> None:
        self.ordered.append(order)

    def ended(self) -> list[PullEnd]:
        ends, self.ends = self.ends, []
        return ends


class Instance:
    def __init__(self) -> None:
        self.now, self.inner, self.orders = 0.0, FakeEngine(), FakeOrders()
        self.engine = TransferringEngine(self.inner, self.orders, run="run", timeout_s=5.0, clock=lambda: self.now)

    def submit(self, group: int, *sources: str) -> None:
        samples = [
            SampleRequest(sample=i, max_new_tokens=9, seed=i, prefix_ids=(7, 8), source=source)
            for i, source in enumerate(sources)
        ]
        request = GenerateRequest(
            group=group,
            min_version=2,
            incarnation=1,
            prompt_ids=(5, 6),
            sampling=SamplingParams(),
            samples=tuple(samples),
        )
        self.engine.submit(request)

    def end(self, pull: int, **how: Any) -> None:
        self.orders.ends.append(PullEnd(pull=pull, **how))
        self.engine.step()


def test_only_what_was_elsewhere_waits() -> None:
    instance = Instance()
    instance.submit(1, "", "a", "")
    assert instance.inner.submitted == [(1, 0), (1, 2)]
    order = instance.orders.ordered[0]
    assert (order.source, order.token_ids, order.timeout_s) == ("a", [5, 6, 7, 8], 5.0)
    assert order.tags == cache_identity("run", 1, 3).kv_transfer_params
    instance.end(order.pull, tokens=4, moved=4)
    assert instance.inner.submitted[-1] == (1, 1)
    assert instance.engine.counts == TransferCounts(moved=1, moved_tokens=4)


def test_a_sample_goes_on_at_its_deadline_with_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    instance = Instance()
    instance.submit(1, "a")
    instance.now = 2.0
    instance.submit(2, "b")
    assert instance.engine.due_in_s() == 3.0 and instance.inner.submitted == []
    instance.now = 5.0
    instance.engine.step()
    assert instance.inner.submitted == [(1, 0)]
    assert "keys and values of 1 samples did not all come from a (it took too long)" in caplog.text
    instance.end(0, tokens=4, moved=4)  # too late
    assert instance.inner.submitted == [(1, 0)] and instance.engine.counts.gave_up == 1
    instance.end(1, cause="the connection was lost")
    assert instance.inner.submitted == [(1, 0), (2, 0)] and instance.engine.counts.gave_up == 2


def test_samples_that_are_ready_together_keep_their_own_requests() -> None:
    instance = Instance()
    for group in (1, 2):
        instance.submit(group, "a", "b")
    instance.orders.ends = [PullEnd(pull=pull, tokens=4, moved=4) for pull in (0, 1, 2)]
    instance.engine.step()
    assert instance.inner.submitted == [(1, 0), (1, 1), (2, 0)]


def test_nothing_there_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    instance = Instance()
    instance.submit(1, "a")
    instance.end(0)
    assert instance.engine.counts == TransferCounts(nothing_there=1) and caplog.text == ""


def test_an_abort_ends_what_waits_too() -> None:
    instance = Instance()
    for group in (1, 2, 3):
        instance.submit(group, "a", "a")
    ended = instance.engine.abort([1])
    ended += instance.engine.abort_samples([(2, 1)])
    assert [(chunk.group, chunk.sample, chunk.finish) for chunk in ended] == [
        (1, 0, FINISH_ABORT),
        (1, 1, FINISH_ABORT),
        (2, 1, FINISH_ABORT),
    ]
    for pull in range(6):
        instance.end(pull, tokens=4)
    assert instance.inner.submitted == [(2, 0), (3, 0), (3, 1)]
    instance.submit(4, "a")
    assert len(instance.engine.abort()) == 4 and instance.orders.ended() == []


def test_what_waits_counts_as_work_in_hand() -> None:
    instance = Instance()
    assert not instance.engine.has_work() and instance.engine.due_in_s() == float("inf")
    instance.submit(1, "a")
    assert instance.engine.has_work() and instance.engine.stats().running == 1
    assert instance.engine.waitables() == [1, 2]
    with pytest.raises(RuntimeError, match="abort them first"):
        instance.engine.sleep()


def test_the_rest_is_the_engines_own() -> None:
    instance = Instance()
    instance.engine.update_weights(4, [])
    assert instance.engine.version == 4 and isinstance(instance.engine, Workers)
    assert instance.engine.cache_events().removed == [1]
    instance.engine.sleep()
    assert instance.engine.version == -1


# ---- orders to the workers -----------------------------------------------------------------------------------


class TwoWorkers:
    """Rank 0 ends a pull at the second call after its order, rank 1 at the third."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.due: list[tuple[int, int, dict[str, Any]]] = []
        self.broken = False

    def call(self, method: str, orders: list[dict[str, Any]], timeout_s: float) -> list[list[dict[str, Any]]]:
        assert method == "psrl_pull_prefixes"
        if self.broken:
            raise RuntimeError("keys and values are not moved here any more")
        number = len(self.calls)
        self.calls.append([order["pull"] for order in orders])
        for order in orders:
            for rank in (0, 1):
                end = PullEnd(pull=order["pull"], tokens=32 - 16 * rank, moved=16)
                self.due.append((number + 1 + rank, rank, msgspec.to_builtins(end)))
        return [[end for when, r, end in self.due if when == number and r == rank] for rank in (0, 1)]


def order(pull: int) -> PullOrder:
    return PullOrder(pull=pull, source="a", token_ids=[1], tags={}, timeout_s=1.0)


def await_ends(orders: WorkerOrders, count: int) -> list[PullEnd]:
    ends: list[PullEnd] = []
    until = time.monotonic() + 30.0
    while len(ends) < count:
        assert time.monotonic() < until
        ends += orders.ended()
        time.sleep(0.002)
    return ends


def test_a_pull_has_ended_once_it_has_in_every_worker() -> None:
    workers = TwoWorkers()
    orders = WorkerOrders(workers.call)
    orders.order(order(7))
    assert await_ends(orders, 1) == [PullEnd(pull=7, tokens=16, moved=16)]
    assert workers.calls[0] == [7] and workers.calls[1:] == [[], []]
    orders.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-orders"]


def test_workers_that_cannot_be_asked_hold_up_nobody() -> None:
    workers = TwoWorkers()
    workers.broken = True
    orders = WorkerOrders(workers.call)
    orders.order(order(1))
    assert await_ends(orders, 1)[0].cause == "keys and values are not moved here any more"
    workers.broken = False
    orders.order(order(2))
    assert await_ends(orders, 1)[0].tokens == 16
    orders.close()
