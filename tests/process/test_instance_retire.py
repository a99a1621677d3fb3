"""How an instance retires or hands its samples back: over real sockets, with an engine that makes a token a step and a coordinator in the test."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from psrl.config.schema import Config
from psrl.net.client import Client
from psrl.net.server import Server
from psrl.protocol import control as c
from psrl.protocol.generation import (
    FINISH_ABORT,
    FINISH_MIGRATED,
    FINISH_REFUSED,
    CacheEvents,
    EngineStats,
    GenerateRequest,
    SampleRequest,
    SamplingParams,
    TokenChunk,
    TokenChunks,
)
from psrl.protocol.samples import VersionSpan
from psrl.role import Role
from psrl.rollout import instance as instance_module
from psrl.rollout.held_blocks import HeldBlocks
from psrl.rollout.instance import Instance
from psrl.rundir.endpoints import Endpoint, publish_next_endpoint
from psrl.rundir.keys import create_keys, load_keys
from psrl.rundir.layout import RunDir
from psrl.rundir.publish import publish

pytestmark = pytest.mark.process

DEADLINE_S = 60.0


class CountingEngine:
    """Token number n of a sample is n; nothing ever ends by itself."""

    version = 0
    on_gpu = False

    def __init__(self) -> None:
        self.running: dict[tuple[int, int], int] = {}
        self.cached: queue.SimpleQueue[CacheEvents] = queue.SimpleQueue()

    def submit(self, request: GenerateRequest) -> None:
        self.running |= {(request.group, s.sample): 0 for s in request.samples}

    def step(self) -> list[TokenChunk]:
        time.sleep(0.001 if self.running else 0.0)
        chunks = [
            TokenChunk(group=g, sample=s, token_ids=[n], logprobs=[-1.0], spans=[VersionSpan(n, n + 1, 0)])
            for (g, s), n in self.running.items()
        ]
        self.running = {key: n + 1 for key, n in self.running.items()}
        return chunks

    def abort(self, groups: Iterable[int] | None = None) -> list[TokenChunk]:
        gone = [key for key in self.running if groups is None or key[0] in groups]
        for key in gone:
            del self.running[key]
        return [
            TokenChunk(group=g, sample=s, token_ids=[], logprobs=[], spans=[], finish=FINISH_ABORT) for g, s in gone
        ]

    def abort_waiting(self) -> list[TokenChunk]:
        return []

    def has_work(self) -> bool:
        return bool(self.running)

    def waitables(self) -> list[int]:
        return []

    def due_in_s(self) -> float:
        return 0.0 if self.running else math.inf

    def weight_specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"w": ((1,), torch.float32)}

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("nothing is pulled here")

    def cache_events(self) -> CacheEvents | None:
        return None if self.cached.empty() else self.cached.get()

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running))

    def close(self) -> None:
        self.running.clear()


class Stage:
    """The test is coordinator and agent loop of one instance, which runs in a thread."""

    def __init__(self, path: Path) -> None:
        run_dir = RunDir(path)
        run_dir.create()
        create_keys(run_dir)
        publish(run_dir.data / "weight_channel", b"filesystem")
        keys = load_keys(run_dir)
        self.run_dir = run_dir
        self.coordinate(1)
        self.engine = CountingEngine()
        config = Config()
        config.psrl.rollout_coordination.routing_strategy.method = "cache_aware"
        self.role = Role(run_dir, config, "instance-0", "n", local=True, attempt="0")
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        hello = self.welcome()
        self.agent = Client(keys, TokenChunks, name="agent-loop-0")
        self.agent.connect(hello.state.endpoint)
        self.chunks: list[TokenChunk] = []

    def _serve(self) -> None:
        instance = Instance(self.role, self.engine)
        try:
            instance.run()
        finally:
            instance.close()

    def heard(self, kind: type) -> c.Message:
        """The first message of this kind; all that came before and with it are in `said`."""

        def found() -> c.Message | None:
            for peer, message in self.server.poll(0.05):
                self.peer = peer
                self.said.append(message)
            return next((m for m in self.said if isinstance(m, kind)), None)

        return self.until(found)

    def coordinate(self, epoch: int) -> None:
        """Be a coordinator that has heard nothing yet."""
        self.server = Server(load_keys(self.run_dir), "127.0.0.1", c.ToCoordinator, epoch=epoch, greeting=c.Hello)
        endpoint = Endpoint(address=self.server.endpoint, node="n", pid=os.getpid(), epoch=epoch)
        publish_next_endpoint(self.run_dir, "coordinator", endpoint)
        self.epoch, self.said = epoch, list[c.Message]()

    def welcome(self) -> c.Hello:
        hello = self.heard(c.Hello)
        self.tell(c.Welcome(epoch=self.epoch, incarnation=0, hello_sent_s=hello.sent_s, now_s=time.monotonic()))
        return hello

    def cache_reports(self) -> list[CacheEvents]:
        self.said += [message for _, message in self.server.poll(0.01)]
        return [m.cache for m in self.said if isinstance(m, c.InstanceStatus) and m.cache is not None]

    def running(self) -> int | None:
        """Samples at the instance, as it said last."""
        self.said += [message for _, message in self.server.poll(0.01)]
        return next((m.stats.running for m in reversed(self.said) if isinstance(m, c.InstanceStatus)), None)

    def ask(self, group: int) -> None:
        request = GenerateRequest(
            group=group,
            min_version=0,
            incarnation=0,
            prompt_ids=(1,),
            sampling=SamplingParams(),
            samples=tuple(SampleRequest(sample=i, max_new_tokens=10**6, seed=0) for i in range(2)),
        )
        assert self.agent.send(request)

    def tell(self, message: c.Message) -> None:
        assert self.server.send(self.peer, message)

    def tokens(self, group: int, sample: int) -> list[int]:
        return [t for chunk in self.of(group, sample) for t in chunk.token_ids]

    def of(self, group: int, sample: int) -> list[TokenChunk]:
        for message in self.agent.poll(0.01):
            self.chunks += message.chunks
        return [chunk for chunk in self.chunks if (chunk.group, chunk.sample) == (group, sample)]

    def ended(self, group: int) -> bool:
        return all((found := self.of(group, sample)) and found[-1].finish for sample in range(2))

    def until(self, condition: Callable):
        deadline = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            assert time.monotonic() < deadline
        return value


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "run")
    yield stage
    if stage.thread.is_alive():
        stage.tell(c.Shutdown(status="failed", cause="the test has failed"))
    stage.thread.join(DEADLINE_S)
    stage.agent.close(0.0)
    stage.server.close(0.0)
    assert not stage.thread.is_alive()


def test_a_retiring_instance_hands_back_every_token_refuses_what_comes_and_waits_until_it_is_dismissed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "RETIRE_GRACE_S", DEADLINE_S)
    stage.ask(7)
    stage.until(lambda: len(stage.tokens(7, 1)) > 20)
    stage.tell(c.Retire(reason="SIGTERM"))
    stage.tell(c.Pull(version=1, incarnation=0, abort_running=True))
    stage.until(lambda: stage.ended(7))
    for sample in range(2):
        found = stage.of(7, sample)
        assert [chunk.finish for chunk in found[:-1]] == [""] * (len(found) - 1) and found[-1].finish == FINISH_REFUSED
        tokens = stage.tokens(7, sample)
        assert tokens == list(range(len(tokens))) and len(tokens) > 20
    stage.ask(8)
    stage.until(lambda: stage.ended(8))
    assert {chunk.finish for chunk in stage.of(8, 0)} == {FINISH_REFUSED} and stage.tokens(8, 0) == []
    assert stage.thread.is_alive()
    stage.tell(c.Dismissed())
    stage.heard(c.Leaving)
    assert not [m for m in stage.said if isinstance(m, c.PullStarted | c.PullFailed)]
    stage.thread.join(DEADLINE_S)
    assert not stage.thread.is_alive()


def test_an_instance_that_is_not_dismissed_leaves_all_the_same(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_module, "RETIRE_GRACE_S", 0.5)
    stage.ask(7)
    stage.until(lambda: stage.tokens(7, 0))
    stage.tell(c.Retire(reason="SIGTERM"))
    stage.thread.join(DEADLINE_S)
    assert not stage.thread.is_alive()
    stage.until(lambda: stage.ended(7))


def test_an_instance_hands_every_token_back_and_goes_on_with_what_comes_next(stage: Stage) -> None:
    stage.ask(7)
    stage.until(lambda: len(stage.tokens(7, 1)) > 20)
    stage.tell(c.HandBack())
    stage.until(lambda: stage.ended(7))
    for sample in range(2):
        found, tokens = stage.of(7, sample), stage.tokens(7, sample)
        assert [chunk.finish for chunk in found if chunk.finish] == [FINISH_MIGRATED]
        assert tokens == list(range(len(tokens))) and len(tokens) > 20
    stage.ask(8)
    stage.until(lambda: len(stage.tokens(8, 0)) > 5 and stage.running() == 2)
    stage.tell(c.HandBack())
    stage.until(
        lambda: stage.ended(8) and stage.running() == 0
    )  # said before it sleeps, however soon after the last report
    stage.tell(c.Shutdown(status="completed", cause=""))
    stage.thread.join(DEADLINE_S)
    assert not stage.thread.is_alive()


def test_an_instance_tells_what_is_cached_in_bounded_parts_and_anew_to_whoever_welcomes_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "MOST_BLOCK_NAMES", 3)

    def told() -> HeldBlocks:
        known = HeldBlocks()
        for report in stage.cache_reports():
            assert len(report.removed) + len(report.stored) <= 3
            known.apply(report)
        return known

    stage.engine.cached.put(CacheEvents(stored=[1, 2, 3, 4, 5, 6, 7]))
    stage.engine.cached.put(CacheEvents(removed=[7], stored=[8]))
    stage.until(lambda: 8 in (known := told()) and 7 not in known and len(known) == 7)
    stage.server.close(0.0)
    stage.coordinate(2)
    stage.welcome()
    stage.until(lambda: len(told()) == 7)
    reports = stage.cache_reports()
    assert [r.cleared for r in reports] == [True, False, False]
    assert [name for r in reports for name in r.stored] == [1, 2, 3, 4, 5, 6, 8]
    stage.engine.cached.put(CacheEvents(cleared=True, stored=[9]))
    stage.until(lambda: 9 in (known := told()) and len(known) == 1)
    stage.tell(c.Shutdown(status="completed", cause=""))
    stage.thread.join(DEADLINE_S)
