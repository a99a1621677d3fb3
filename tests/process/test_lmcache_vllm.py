"""LMCache within vLLM's build for CPUs: what it loads is what was computed, and follows a conversation to another instance."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_vllm import CHUNK, Asked, asked, conversations

if importlib.util.find_spec("lmcache") is None or importlib.util.find_spec("vllm") is None:
    pytest.skip("LMCache and vLLM are not both installed", allow_module_level=True)
pytestmark = [pytest.mark.lmcache, pytest.mark.vllm, pytest.mark.process]
ROLLOUT = "gen_actor_rollout_ref.rollout"


def test_what_is_loaded_is_what_these_weights_made(tmp_path: Path) -> None:
    with asked(tmp_path / "model", {"enforce_eager": True}) as engine:
        engine.check(500)
        engine.check(481)


def test_chunks_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"psrl\.lmcache\.chunk_size must be a multiple of 128"):
        Asked(tmp_path / "model", {"enforce_eager": True, "block_size": 128})


@pytest.mark.parametrize("mode", ["pin_sync", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_conversation_finds_its_keys_and_values_at_another_instance(mode: str, tmp_path: Path) -> None:
    overrides = {f"{ROLLOUT}.engine_kwargs.vllm.block_size": CHUNK, f"{ROLLOUT}.dtype": "float32"}
    moved, tokens = conversations(tmp_path / "run", mode, overrides)
    print(f"{mode}: {moved} turns found {tokens} tokens that the other instance had computed")
    assert moved > 0 and tokens >= moved * CHUNK


def test_a_step_that_is_one_graph_loads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no attention metadata for it then, which LMCache takes for a step without requests."""
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

    from psrl.rollout.lmcache_connector import LMCacheBlockConnector

    seen: list[Any] = []
    monkeypatch.setattr(LMCacheConnectorV1, "start_load_kv", lambda self, context: seen.append(context))
    connector = LMCacheBlockConnector.__new__(LMCacheBlockConnector)
    usual = SimpleNamespace(attn_metadata={"layer": 1})
    connector.start_load_kv(SimpleNamespace(attn_metadata=None))
    connector.start_load_kv(usual)
    assert seen[0].attn_metadata is not None and seen[1] is usual
