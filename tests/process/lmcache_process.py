"""One instance's LMCache without an engine around it: the worker side and the scheduler side as vLLM's connector joins them.

Started with the settings of `psrl.rollout.lmcache_settings` as JSON and, to exchange prefixes, those of `share_prefixes`; then one
JSON command a line on stdin, one answer a line on stdout. Keys and values are `mark`, so a wrong entry is seen.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.config_base import validate_and_set_config_value
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.lookup_client.lmcache_async_lookup_client import LMCacheAsyncLookupClient, LMCacheAsyncLookupServer
from lmcache.v1.metadata import LMCacheMetadata

from psrl.rollout.lmcache_exchange import PrefixExchange
from psrl.rollout.lmcache_worker import answer_in_time, pull_prefixes
from psrl.rundir.layout import RunDir

LAYERS, HEADS, HEAD_SIZE = 2, 2, 4


class Recorder(MockGPUConnector):
    """Writes `mark` into what is stored and says what it finds in what is loaded."""

    layout = "marks"

    def attach(self):
        """There is no cache of an engine here."""

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory in memory_objs:
            memory.tensor.fill_(kwargs["mark"])

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        self.loaded = [float(memory.tensor.float().mean()) for memory in memory_objs]


def make_cache(
    settings: Mapping[str, object], name: str = ""
) -> tuple[LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata]:
    """An engine's LMCache with these settings in this process, filed under `name` ("": its instance's), not yet started."""
    config = LMCacheEngineConfig.from_defaults()
    for key, value in settings.items():
        assert validate_and_set_config_value(config, key, value), key
    config.validate()
    shape = (LAYERS, 2, config.chunk_size, HEADS, HEAD_SIZE)
    metadata = LMCacheMetadata(
        model_name="tiny",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=shape,
        role="worker",
        chunk_size=config.chunk_size,
        engine_id=config.lmcache_instance_id,
    )
    engine = LMCacheEngineBuilder.get_or_create(
        name or config.lmcache_instance_id,
        config,
        metadata,
        Recorder(shape),
        lambda tensor, rank: None,
        lambda thing, rank: thing,
    )
    return engine, config, metadata


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # LMCache logs to stdout
    engine, config, metadata = make_cache(json.loads(sys.argv[1]))
    connector = engine.gpu_connector
    server = client = None
    if config.enable_async_loading:
        server = LMCacheAsyncLookupServer(engine, metadata)
        client = LMCacheAsyncLookupClient(config, metadata)
    engine.post_init(async_lookup_server=server)
    answer_in_time(engine)
    exchange = None
    if len(sys.argv) > 2:
        shared = json.loads(sys.argv[2])
        exchange = PrefixExchange(engine, **shared | {"run_dir": RunDir(Path(shared["run_dir"]))})

    def found(tokens: list[int], tags: dict[str, str], lookup_id: str) -> int:
        """What the scheduler would be told: prefix tokens that need not be computed."""
        if client is None:
            return engine.lookup(tokens, lookup_id=lookup_id, pin=False, request_configs=tags)
        if client.lookup_cache(lookup_id) == -1:
            client.lookup(tokens, lookup_id=lookup_id, request_configs=tags)
        while (hit := client.lookup_cache(lookup_id)) is None:
            time.sleep(0.001)
        return hit

    def say(answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    say("ready")
    for number, line in enumerate(sys.stdin):
        command, tokens, tags, *rest = json.loads(line)
        if command == "store":
            engine.store(tokens, request_configs=tags, mark=rest[0], req_id=f"s{number}")
            say("stored")
        elif command == "lookup":
            begun = time.monotonic()
            hit = found(tokens, tags, f"l{number}")
            say([hit, time.monotonic() - begun])
        elif command == "load":
            hit = found(tokens, tags, f"l{number}")
            connector.loaded = []
            if hit:
                engine.retrieve(tokens[:hit], request_configs=tags, req_id=f"l{number}")
            say([hit, connector.loaded])
        elif command == "hashes":
            say([name for _, _, name in engine.token_database.process_tokens(tokens=tokens, make_key=False)])
        elif command == "psrl_pull_prefixes":
            say(pull_prefixes(exchange, tokens))
        elif command == "held":
            entries = engine.storage_manager.local_cpu_backend.hot_cache.values()
            say(
                {
                    "chunks": len(entries),
                    "pinned": sum(entry.is_pinned for entry in list(entries)),
                    "kept": exchange.source.kept,
                }
            )


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # LMCache's threads would keep the process alive
    os._exit(0)
