"""LMCache's multi-process server on the CPU, with the salts that psrl gives requests: its connector goes by them, not by tags."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psrl.rollout.cache_identity import cache_identity
from psrl.rollout.lmcache_instance import free_ports

pytest.importorskip("lmcache", reason="needs LMCache: pip install 'psrl[lmcache]'")
pytestmark = [pytest.mark.process, pytest.mark.lmcache]

BLOCK, BLOCKS, CHUNKS = 16, 64, 4
START_S, ANSWER_S = 400.0, 60.0
SALTS = [cache_identity(*which).cache_salt for which in (("a", 0, 1), ("a", 0, 2), ("a", 1, 1), ("b", 0, 1))]
MODEL = "tiny"


class ServedEngine:
    """What a worker's connector says to the server, block tables and all. Every layer's keys and values are one number."""

    def __init__(self, endpoint: str) -> None:
        import torch
        import zmq
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self.client: Any = RequestClientFactory.create(endpoint, context=zmq.Context())
        assert self.client.get_chunk_size().result(timeout=START_S) == BLOCK
        self.cache = {f"layer.{i}": torch.zeros(2, BLOCKS, BLOCK, 2, 4) for i in range(2)}
        self.moves: Any = EngineDrivenTransferContext(1000, self.client)
        group = EngineGroupInfo(engine_group_id=0, layer_indices=(0, 1), tokens_per_block=BLOCK)
        self.moves.register(
            self.cache,
            MODEL,
            1,
            1,
            ANSWER_S,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[group],
            engine_type=EngineType.VLLM,
        )
        self.requests = 0

    def store(self, ids: list[int], salt: str, mark: float) -> None:
        for layer in self.cache.values():
            layer[:, :CHUNKS] = mark
        request = self._next()
        key, event = self._key(ids, salt, request, worker=0), self.moves.create_recorded_event()
        blocks = [list(range(CHUNKS))]
        assert self.moves.submit_store(request, key, self.cache, blocks, event, 1).result(timeout=ANSWER_S)
        self.client.end_session(request).result(timeout=ANSWER_S)

    def load(self, ids: list[int], salt: str) -> list[float]:
        """What each chunk that is found holds."""
        request = self._next()
        self.client.lookup(self._key(ids, salt, request), 1).result(timeout=ANSWER_S)
        until = time.monotonic() + ANSWER_S
        while (found := self.client.query_prefetch_status(request).result(timeout=ANSWER_S)) is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        blocks = list(range(CHUNKS, CHUNKS + found))
        if found:
            for layer in self.cache.values():
                layer[:, blocks] = 0.0
            key = self._key(ids[: found * BLOCK], salt, request, worker=0)
            event = self.moves.create_recorded_event()
            moved = self.moves.submit_retrieve(request, key, self.cache, [blocks], event, 1, skip_first_n_tokens=0)
            assert moved.result(timeout=ANSWER_S)
        self.client.end_session(request).result(timeout=ANSWER_S)
        return [float(self.cache["layer.1"][:, block].mean()) for block in blocks]

    def _next(self) -> str:
        self.requests += 1
        return f"request-{self.requests}"

    def _key(self, ids: list[int], salt: str, request: str, worker: int | None = None) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        return IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            worker_id=worker,
            token_ids=tuple(ids),
            start=0,
            end=len(ids),
            request_id=request,
            cache_salt=salt,
            num_kv_readers=1,
        )


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ServedEngine]:
    port, http = free_ports("127.0.0.1", 2)
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-host": "127.0.0.1",
        "--http-port": http,
        "--chunk-size": BLOCK,
        "--l1-size-gb": 0.05,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "engine_driven",
    }
    words = [str(word) for pair in options.items() for word in pair]
    command = [str(Path(sys.executable).with_name("lmcache")), "server", *words, "--disable-observability"]
    environment = os.environ | {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        yield ServedEngine(f"tcp://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()


def test_a_salt_keeps_versions_incarnations_and_runs_apart(engine: ServedEngine) -> None:
    ids = list(range(100, 100 + CHUNKS * BLOCK))
    engine.store(ids, SALTS[0], 7.0)
    assert [engine.load(ids, salt) for salt in SALTS] == [[7.0] * CHUNKS, [], [], []]
    engine.store(ids, SALTS[1], 8.0)
    assert [engine.load(ids, salt) for salt in SALTS] == [[7.0] * CHUNKS, [8.0] * CHUNKS, [], []]
