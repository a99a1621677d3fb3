"""`psrl.lmcache.clear_on_weight_update` on the real tier: what a worker of vLLM does at a switch, without vLLM around it.

Without tags an entry of the old weights that outlives the switch would serve the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lmcache_workers import CHUNK, SMALL, tokens

from psrl.config.coordination import KVTransferConfig
from psrl.config.lmcache import LMCacheConfig
from psrl.rollout.lmcache_settings import lmcache_settings
from psrl.rollout.lmcache_worker import attend_offload_tier, empty_offload_tier

pytest.importorskip("lmcache", reason="needs LMCache: pip install 'psrl[lmcache]'")
pytestmark = [pytest.mark.process, pytest.mark.lmcache]

UNTAGGED = LMCacheConfig(**SMALL, multi_version_kv=False, clear_on_weight_update=True)


class Worker:
    """LMCache in this process, under the name that vLLM's connector gives it: `empty_offload_tier` finds it there."""

    def __init__(self) -> None:
        from lmcache.integration.vllm.utils import ENGINE_NAME
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache_process import make_cache

        settings = lmcache_settings(UNTAGGED, KVTransferConfig(), instance="i", ranks=1)
        self.name, self.builder = ENGINE_NAME, LMCacheEngineBuilder
        self.engine: Any = make_cache(settings.engine_config, ENGINE_NAME)[0]
        self.engine.post_init()

    def store(self, ids: list[int], mark: float) -> None:
        self.engine.store(ids, mark=mark, req_id=f"s{ids[0]}")

    def hit(self, ids: list[int], pinned_by: str | None = None) -> int:
        return self.engine.lookup(ids, lookup_id=pinned_by or "look", pin=pinned_by is not None)

    def load(self, ids: list[int]) -> list[float]:
        self.engine.gpu_connector.loaded = []
        self.engine.retrieve(ids, req_id="load")
        return self.engine.gpu_connector.loaded

    def close(self) -> None:
        self.builder.destroy(self.name)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    made = Worker()
    attend_offload_tier()
    yield made
    made.close()


def test_nothing_of_the_old_weights_is_found_after_a_switch(worker: Worker) -> None:
    prefixes = [tokens(1000 * i) for i in range(5)]
    for i, ids in enumerate(prefixes):
        worker.store(ids, float(i))
    assert [worker.hit(ids) for ids in prefixes] == [4 * CHUNK] * 5
    assert worker.load(prefixes[3]) == [3.0] * 4
    assert empty_offload_tier() > 0
    assert [worker.hit(ids) for ids in prefixes] == [0] * 5 and worker.load(prefixes[3]) == []
    assert empty_offload_tier() == 0


def test_the_tier_serves_the_new_weights_afterwards(worker: Worker) -> None:
    ids = tokens(100)
    for mark in (1.0, 2.0, 3.0):
        worker.store(ids, mark)
        assert worker.load(ids) == [mark] * 4
        empty_offload_tier()
    worker.store(ids[: 2 * CHUNK], 4.0)
    assert worker.hit(ids) == 2 * CHUNK and worker.load(ids[: 2 * CHUNK]) == [4.0] * 2


def test_emptying_gives_all_memory_back(worker: Worker) -> None:
    whole = tokens(0, chunks=64)
    for _ in range(200):  # more than twice what the tier holds
        worker.store(whole, 1.0)
        assert worker.hit(whole) == len(whole)
        empty_offload_tier()


def test_what_a_sample_has_looked_up_and_not_yet_loaded_goes_too(worker: Worker) -> None:
    """vLLM's connector pins what it has found until it is loaded; a sample that is handed back in between leaves the pins."""
    ids = tokens(100)
    worker.store(ids, 1.0)
    assert worker.hit(ids, pinned_by="request-1") == len(ids)
    empty_offload_tier()
    assert worker.hit(ids) == 0
    worker.engine.lookup_unpin("request-1")
    worker.store(ids, 2.0)
    assert worker.load(ids) == [2.0] * 4


def test_a_worker_without_a_tier_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (attend_offload_tier, empty_offload_tier):
        with pytest.raises(RuntimeError, match="LMCache did not start in this worker"):
            call()


def test_settings_that_take_blocks_apart_are_refused(worker: Worker) -> None:
    config = worker.engine.config
    config.remote_url, config.remote_serde = "lm://127.0.0.1:1", "cachegen"
    with pytest.raises(ValueError, match="remote_serde=cachegen squeezes keys and values"):
        attend_offload_tier()
    config.save_unfull_chunk = True
    with pytest.raises(ValueError, match=r"take save_unfull_chunk out of psrl\.lmcache\.config_file"):
        attend_offload_tier()


def test_latent_attention_on_pipeline_stages_is_refused(worker: Worker) -> None:
    worker.engine.save_only_first_rank = True
    attend_offload_tier(1)
    with pytest.raises(ValueError, match="use pipeline_model_parallel_size=1"):
        attend_offload_tier(2)
