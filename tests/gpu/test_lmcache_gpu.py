"""LMCache within real vLLM on a GPU: what it loads is what was computed, and follows a conversation to another instance."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from lmcache_vllm import CHUNK, asked, conversations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="lmcache is not installed"),
]
ROLLOUT = "gen_actor_rollout_ref.rollout"


def test_what_is_loaded_is_what_these_weights_made(tmp_path: Path) -> None:
    """Of 481 tokens one is left to compute: with CUDA graphs that step is one whole graph."""
    with asked(tmp_path / "model", {}) as engine:
        engine.check(500)
        engine.check(481)


@pytest.mark.parametrize("mode", ["sync", "pin_sync"])
def test_a_conversation_finds_its_keys_and_values_at_another_instance(mode: str, tmp_path: Path) -> None:
    overrides: dict[str, object] = {
        "trainer.device": "cuda",
        "trainer.gpu_memory_fraction": 0.3,
        "train_actor_rollout_ref.actor.mixed_precision": "bfloat16",
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.gpu_memory_utilization": 0.15,
        f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": 2**30,
    }
    moved, tokens = conversations(tmp_path / "run", mode, overrides)
    print(f"{mode}: {moved} turns found {tokens} tokens that the other instance had computed")
    assert moved > 0 and tokens >= moved * CHUNK
