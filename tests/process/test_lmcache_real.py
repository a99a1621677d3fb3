"""The real LMCache, on the CPU, driven by the settings and identities that psrl makes. Skipped where it is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_workers import CHUNK, NEXT, OTHER_RUN, RESUMED, SMALL, N, Worker, tokens

from psrl.config.coordination import KVTransferConfig
from psrl.config.lmcache import LMCacheConfig
from psrl.rollout.lmcache_instance import free_ports
from psrl.rollout.lmcache_settings import PORTS_PER_RANK, lmcache_settings, peer_address

pytest.importorskip("lmcache", reason="needs LMCache: pip install 'psrl[lmcache]'")
pytestmark = [pytest.mark.process, pytest.mark.lmcache]

TRANSFER_MS = 1000


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"backend": "disk", "disk_path": "/nowhere", "cache_policy": "FIFO"},
        {"enable_p2p": True, "controller_host": "localhost"},
    ],
)
def test_lmcache_knows_every_setting(given: dict[str, Any]) -> None:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.config_base import validate_and_set_config_value  # what vLLM's connector takes them with

    peer = peer_address("127.0.0.1", range(9000, 9000 + 2 * PORTS_PER_RANK))
    transfer = KVTransferConfig(enable=True)
    values = lmcache_settings(LMCacheConfig(**SMALL | given), transfer, instance="i", ranks=2, peer=peer).engine_config
    known = LMCacheEngineConfig.from_defaults()
    assert all(validate_and_set_config_value(known, name, value) for name, value in values.items())
    known.validate()
    assert {name: getattr(known, name) for name in values} == values


def test_what_one_version_made_never_serves_another(tmp_path: Path) -> None:
    asked = LMCacheConfig(**SMALL, backend="disk", disk_path=str(tmp_path / "kv"), max_disk_size_gb=0.02)
    worker = Worker(lmcache_settings(asked, KVTransferConfig(), instance="i", ranks=1), tmp_path / "log")
    try:
        assert worker.answer() == "ready"
        ids = tokens(100)
        worker.store(ids, N, 7.0)
        assert worker.load(ids, N) == (len(ids), [7.0] * 4)
        assert [worker.hit(ids, other) for other in (NEXT, RESUMED, OTHER_RUN, {})] == [0, 0, 0, 0]
        worker.store(ids, NEXT, 8.0)
        assert worker.load(ids, NEXT)[1] == [8.0] * 4 and worker.load(ids, N)[1] == [7.0] * 4
        assert worker.hit(tokens(100, chunks=6), N) == len(ids)
        assert list((tmp_path / "kv" / "i").iterdir())
    finally:
        worker.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    """Two instances that know of each other through a controller."""
    place = tmp_path_factory.mktemp("p2p")
    http, pull, reply, *rest = free_ports("127.0.0.1", 3 + 2 * PORTS_PER_RANK)
    asked = LMCacheConfig(
        **SMALL,
        enable_p2p=True,
        p2p_transfer_channel="tcp",
        controller_host="127.0.0.1",
        controller_pull_port=pull,
        controller_reply_port=reply,
    )
    transfer = KVTransferConfig(enable=True, transfer_timeout_ms=TRANSFER_MS)
    workers: list[Worker] = []
    monitor = json.dumps({"pull": pull, "reply": reply})
    command = ["lmcache_controller", "--host", "127.0.0.1", "--port", str(http), "--monitor-ports", monitor]
    with (place / "controller").open("w") as log:
        controller = subprocess.Popen(
            [str(Path(sys.executable).with_name(command[0])), *command[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LMCACHE_TRACK_USAGE": "false"},
        )
    try:
        for i in range(2):
            peer = peer_address("127.0.0.1", rest[i * PORTS_PER_RANK : (i + 1) * PORTS_PER_RANK])
            settings = lmcache_settings(asked, transfer, instance=f"i-{i}", ranks=1, peer=peer)
            workers.append(Worker(settings, place / f"worker-{i}"))
        assert [worker.answer() for worker in workers] == ["ready", "ready"]
        yield workers[0], workers[1]
    finally:
        for worker in workers:
            worker.kill()
        controller.kill()
        controller.wait()


def test_the_target_loads_what_the_source_stored(pair: tuple[Worker, Worker]) -> None:
    source, target = pair
    source.store(tokens(1000), N, 3.0)
    assert target.load(tokens(1000, chunks=6), N) == (4 * CHUNK, [3.0] * 4)


def test_no_answer_lies_about_until_the_deadline(pair: tuple[Worker, Worker]) -> None:
    """See `answer_in_time`: without it half of these found nothing."""
    source, target = pair
    prompts = [tokens(10_000 + 1000 * i) for i in range(8)]
    for prompt in prompts:
        source.store(prompt, N, 1.0)
    assert target.load(prompts[-1], N)[0]  # connected, and the controller knows of all
    assert [target.hit(prompt, N) for prompt in prompts[:-1]] == [4 * CHUNK] * 7


def test_another_version_at_the_source_is_a_miss(pair: tuple[Worker, Worker]) -> None:
    source, target = pair
    source.store(tokens(2000), N, 4.0)
    assert target.load(tokens(2000), N)[1] == [4.0] * 4  # the controller knows of it by now
    for other in (NEXT, RESUMED, OTHER_RUN):
        assert target.hit(tokens(2000), other) == 0


def test_a_transfer_that_takes_too_long_is_given_up(pair: tuple[Worker, Worker]) -> None:
    source, target = pair
    source.store(tokens(3500), N, 6.0)
    source.store(tokens(3000), N, 5.0)
    assert target.load(tokens(3000), N)[1] == [5.0] * 4  # the controller knows of both by now
    with source.stopped():
        hit, waited_s = target.ask("lookup", tokens(3500), N)
    assert hit == 0 and TRANSFER_MS / 1000 <= waited_s < 4 * TRANSFER_MS / 1000


def test_every_process_gives_a_prefix_the_same_name(pair: tuple[Worker, Worker]) -> None:
    """They differed between processes once (LMCache#1139, #2136): then nothing is ever found, and nothing says so."""
    names = [worker.ask("hashes", tokens(100), {}) for worker in pair]
    assert names[0] == names[1] and len(set(names[0])) == 4
    settings = lmcache_settings(LMCacheConfig(**SMALL), KVTransferConfig(), instance="i", ranks=1)
    code = "import sys, json; print(json.dumps([hash((0, (1, 2, 3), ())), hash('a')]))"
    made = {
        subprocess.check_output([sys.executable, "-c", code], env=os.environ | settings.environment) for _ in range(3)
    }
    assert len(made) == 1


def test_a_killed_source_is_given_up_but_lmcache_goes_on_waiting_for_it(pair: tuple[Worker, Worker]) -> None:
    """The last of this module: it takes the source away. Why docs/lmcache.md prefers sync where instances may die."""
    source, target = pair
    target.store(tokens(5000), N, 1.0)
    source.store(tokens(5500), N, 2.0)
    source.store(tokens(6000), N, 3.0)
    assert target.hit(tokens(5000), N) == 4 * CHUNK
    assert target.load(tokens(6000), N)[1] == [3.0] * 4  # the controller knows of both by now
    source.kill()
    hit, waited_s = target.ask("lookup", tokens(5500), N)
    assert hit == 0 and TRANSFER_MS / 1000 <= waited_s < 4 * TRANSFER_MS / 1000
    assert target.hit(tokens(5000), N) == 0  # its own: LMCache loads for one request at a time
