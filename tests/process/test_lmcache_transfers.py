"""kv_transfer sync and pin_sync between real LMCache workers on the CPU: two processes, NIXL, no controller."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_workers import CHUNK, DEADLINE_S, NEXT, OTHER_RUN, RESUMED, SMALL, N, Worker, tokens
from msgspec.structs import replace

from psrl.config.coordination import KVTransferConfig
from psrl.config.lmcache import LMCacheConfig
from psrl.net.client import Client
from psrl.protocol.generation import GenerateRequest, SampleRequest, SamplingParams
from psrl.rollout.lmcache_engine import TransferringEngine
from psrl.rollout.lmcache_exchange import endpoint_name
from psrl.rollout.lmcache_messages import Done, Have, Want
from psrl.rollout.lmcache_orders import WorkerOrders
from psrl.rollout.lmcache_settings import lmcache_settings
from psrl.rundir.endpoints import latest_endpoint
from psrl.rundir.keys import create_keys, load_keys
from psrl.rundir.layout import RunDir

pytest.importorskip("lmcache", reason="needs LMCache: pip install 'psrl[lmcache]'")
pytestmark = [pytest.mark.process, pytest.mark.lmcache]

MODES = ("sync", "pin_sync")
TINY = SMALL | {"offload_size_gb": 0.0005}
"""A tier of 131 chunks: LMCache rounds each of these small ones up to 4 KiB."""
TINY_CHUNKS = 131
CHUNKS_OF_ONE = 4
SHORT_S = 1.0


class Fleet:
    """Workers of one run, the first two made at once."""

    def __init__(self, place: Path, mode: str, asked: dict[str, Any]) -> None:
        self.place, self.mode, self.asked = place, mode, asked
        self.run_dir = RunDir(place / "run")
        self.run_dir.create()
        create_keys(self.run_dir)
        self.workers: list[Worker] = []
        self.source, self.target = self.start("i-0"), self.start("i-1")
        assert [worker.answer() for worker in self.workers] == ["ready", "ready"]

    def start(self, instance: str) -> Worker:
        transfer = KVTransferConfig(enable=True, transfer_mode=self.mode)
        asked = LMCacheConfig(**self.asked, enable_p2p=True, p2p_transfer_channel="tcp")
        shared = {
            "run_dir": str(self.run_dir.path),
            "instance": instance,
            "node": "here",
            "address": "127.0.0.1",
            "pin_at_once": self.mode == "pin_sync",
        }
        log = self.place / f"{instance}-{len(self.workers)}.log"
        self.workers.append(Worker(lmcache_settings(asked, transfer, instance=instance, ranks=1), log, shared))
        return self.workers[-1]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


@pytest.fixture(scope="module", params=MODES)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp(request.param), request.param, SMALL)
    yield made
    made.close()


def test_the_target_has_what_the_source_stored_before_its_engine_is_asked(fleet: Fleet) -> None:
    ids = tokens(1000)
    fleet.source.store(ids, N, 3.0)
    assert fleet.target.hit(ids, N) == 0  # the engine itself asks nobody
    end = fleet.target.fetch([*ids, *tokens(9000, chunks=2)], N, "i-0")
    assert (end["tokens"], end["moved"], end["cause"]) == (len(ids), len(ids), "")
    assert fleet.target.load(ids, N) == (len(ids), [3.0] * 4)
    again = fleet.target.fetch(ids, N, "i-0")
    assert (again["tokens"], again["moved"]) == (len(ids), 0)
    assert fleet.source.held()["pinned"] == fleet.target.held()["pinned"] == 0


def test_only_what_is_missing_moves(fleet: Fleet) -> None:
    ids = tokens(1500, chunks=6)
    fleet.source.store(ids, N, 2.0)
    fleet.target.store(ids[: 2 * CHUNK], N, 9.0)
    end = fleet.target.fetch(ids, N, "i-0")
    assert (end["tokens"], end["moved"]) == (len(ids), 4 * CHUNK)
    assert fleet.target.load(ids, N)[1] == [9.0] * 2 + [2.0] * 4


def test_another_version_is_a_miss_and_both_may_be_there(fleet: Fleet) -> None:
    ids = tokens(2000)
    fleet.source.store(ids, N, 4.0)
    for other in (NEXT, RESUMED, OTHER_RUN, {}):
        end = fleet.target.fetch(ids, other, "i-0")
        assert (end["tokens"], end["cause"]) == (0, "")
    fleet.source.store(ids, NEXT, 5.0)
    assert fleet.target.fetch(ids, NEXT, "i-0")["moved"] == len(ids)
    assert fleet.target.load(ids, NEXT)[1] == [5.0] * 4 and fleet.target.hit(ids, N) == 0


def test_a_stopped_source_is_given_up_in_time_and_serves_again_afterwards(fleet: Fleet) -> None:
    ids = tokens(3000)
    fleet.source.store(ids, N, 6.0)
    with fleet.source.stopped():
        end = fleet.target.fetch(ids, N, "i-0", SHORT_S)
        assert (end["tokens"], end["cause"]) == (0, "it took too long")
        assert fleet.target.hit(ids, N) == 0
    assert fleet.target.fetch(ids, N, "i-0")["moved"] == len(ids)
    assert fleet.target.load(ids, N)[1] == [6.0] * 4
    wait_until(lambda: fleet.source.held()["kept"] == 0)


class RecordingEngine:
    """Its worker is a Worker. What it is given, and how much of the prefix its LMCache has at that moment."""

    version, on_gpu = 1, True

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.given: list[tuple[int, int]] = []

    def call_workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return [self.worker.ask(method, *args, {})]

    def submit(self, request: GenerateRequest) -> None:
        self.given += [
            (sample.sample, self.worker.hit([*request.prompt_ids, *sample.prefix_ids], N)) for sample in request.samples
        ]

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def test_a_sample_reaches_the_engine_once_its_prefix_is_here_or_late(fleet: Fleet) -> None:
    inner = RecordingEngine(fleet.target)
    engine = TransferringEngine(inner, WorkerOrders(inner.call_workers), run="run-a", timeout_s=DEADLINE_S)
    prompt, made = tokens(20_000, chunks=2), tokens(30_000, chunks=3)
    fleet.source.store([*prompt, *made], N, 5.0)
    moved = SampleRequest(sample=0, max_new_tokens=9, seed=1, prefix_ids=tuple(made), source="i-0")
    stays = SampleRequest(sample=1, max_new_tokens=9, seed=1)
    request = GenerateRequest(
        group=1,
        min_version=1,
        incarnation=0,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(),
        samples=(moved, stays),
    )

    def served() -> bool:
        engine.step()
        return not any(sample not in {given for given, _ in inner.given} for sample in (0, 1))

    engine.submit(request)
    assert inner.given == [(1, 0)]
    wait_until(served)
    assert inner.given == [(1, 0), (0, 5 * CHUNK)]
    engine.close()

    engine = TransferringEngine(inner, WorkerOrders(inner.call_workers), run="run-a", timeout_s=SHORT_S)
    late = replace(moved, prefix_ids=tuple(tokens(40_000)))
    fleet.source.store([*prompt, *late.prefix_ids], N, 5.0)
    with fleet.source.stopped():
        inner.given = [(1, 0)]
        engine.submit(replace(request, samples=(late,)))
        wait_until(served)
    assert inner.given == [(1, 0), (0, 2 * CHUNK)] and engine.counts.gave_up == 1
    engine.close()


def test_an_instance_that_nobody_knows_costs_no_wait(fleet: Fleet) -> None:
    end = fleet.target.fetch(tokens(3500), N, "i-9")
    assert (end["tokens"], end["cause"]) == (0, "nobody knows where it is")


def test_many_prefixes_at_a_time_keep_their_content(fleet: Fleet) -> None:
    prefixes = [tokens(100_000 + 1000 * i, chunks=8) for i in range(40)]
    for i, ids in enumerate(prefixes):
        fleet.source.store(ids, N, float(i))
    pulls = [fleet.target.order(ids, N, "i-0") for ids in prefixes]
    assert [fleet.target.end(pull)["tokens"] for pull in pulls] == [8 * CHUNK] * 40
    assert [fleet.target.load(ids, N)[1] for ids in prefixes] == [[float(i)] * 8 for i in range(40)]


def test_a_killed_source_is_noticed_and_its_successor_found(fleet: Fleet) -> None:
    """The last of this module: it replaces the source."""
    ids = tokens(4000)
    fleet.source.kill()
    end = fleet.target.fetch(ids, N, "i-0")
    assert end["tokens"] == 0 and end["cause"] not in ("", "it took too long")
    fleet.source = fleet.start("i-0")
    assert fleet.source.answer() == "ready"
    fleet.source.store(ids, N, 7.0)
    assert fleet.target.fetch(ids, N, "i-0")["moved"] == len(ids)
    assert fleet.target.load(ids, N)[1] == [7.0] * 4


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, "pin_sync", TINY)
    yield made
    made.close()


class Reader:
    """This test in the place of a target."""

    def __init__(self, fleet: Fleet) -> None:
        self.client = Client(load_keys(fleet.run_dir), Have, name="reader")
        found = latest_endpoint(fleet.run_dir, endpoint_name("i-0", 0))
        assert found is not None
        self.client.connect(found[1].address)

    def want(self, hashes: list[int], layout: str, lease_s: float) -> Have:
        self.client.send(Want(pull=1, hashes=hashes, tags=N, lease_s=lease_s, layout=layout))
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            if answers := self.client.poll(0.1):
                return answers[0]
        raise AssertionError("no answer")


def fill(worker: Worker, start: int) -> None:
    """Other prefixes, more than the tier has room for."""
    for i in range(TINY_CHUNKS // CHUNKS_OF_ONE + 4):
        worker.store(tokens(start + 1000 * i, chunks=CHUNKS_OF_ONE), N, 1.0)


@pytest.mark.parametrize("end", ["read", "lease over", "reader gone"])
def test_what_is_wanted_stays_until_it_is_read_given_up_or_late(tiny: Fleet, end: str) -> None:
    ids = tokens(100)
    tiny.source.store(ids, N, 8.0)
    reader, hashes = Reader(tiny), tiny.source.ask("hashes", ids, {})
    refused = reader.want(hashes, "a chunk of another model", DEADLINE_S)
    assert refused.addresses == [] and "not a chunk of another model" in refused.cause
    layout = refused.cause.removeprefix("chunks there are ").removesuffix(", not a chunk of another model")
    have = reader.want(hashes, layout, 10 * SHORT_S if end == "lease over" else 10 * DEADLINE_S)
    assert len(set(have.addresses)) == 4
    fill(tiny.source, 10_000)
    held = tiny.source.held()
    if held["kept"]:  # not so on a machine so slow that the short lease is over by now
        assert held["pinned"] == held["kept"] == 4 and tiny.source.hit(ids, N) == len(ids)
    else:
        assert end == "lease over"
    if end == "read":
        reader.client.send(Done(pull=1))
    elif end == "reader gone":
        reader.client.close()
    wait_until(lambda: tiny.source.held()["kept"] == 0)
    assert tiny.source.held()["pinned"] == 0
    fill(tiny.source, 500_000)
    assert tiny.source.hit(ids, N) == 0


def test_no_more_than_half_of_a_tier_is_kept_for_others(tiny: Fleet) -> None:
    ids = tokens(100, chunks=100)
    tiny.source.store(ids, N, 8.0)
    end = tiny.target.fetch(ids, N, "i-0")
    assert end["moved"] == TINY_CHUNKS // 2 * CHUNK
    assert tiny.target.load(ids, N)[1] == [8.0] * (TINY_CHUNKS // 2)


def test_a_source_under_pressure_gives_the_right_entries_or_none(tiny: Fleet) -> None:
    for i in range(10):
        ids = tokens(1000 * i, chunks=8)
        tiny.source.store(ids, N, float(i))
        pull = tiny.target.order(ids, N, "i-0")
        fill(tiny.source, 1_000_000)
        end = tiny.target.end(pull)
        hit, marks = tiny.target.ask("load", ids, N)
        assert hit == end["tokens"] and marks == [float(i)] * (hit // CHUNK)


def wait_until(condition: Any) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
