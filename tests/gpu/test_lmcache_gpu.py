"""LMCache within real vLLM on a GPU: entries belong to the weights that made them, and follow a conversation to another instance."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runs import DEADLINE_S, Run
from transformers import Qwen3Config, Qwen3ForCausalLM

from psrl.config.coordination import KVTransferConfig
from psrl.config.lmcache import LMCacheConfig
from psrl.models.load import checkpoint_specs
from psrl.net.waiting import wait
from psrl.protocol.generation import GenerateRequest, SampleRequest, SamplingParams
from psrl.rollout.lmcache_instance import environment
from psrl.rollout.lmcache_settings import lmcache_settings
from psrl.telemetry.metrics import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="lmcache is not installed"),
]

CHUNK, PROMPT, NEW = 32, 500, 8
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROLLOUT, ROUTING = "gen_actor_rollout_ref.rollout", "psrl.rollout_coordination.routing_strategy"


class Asked:
    """A real engine with LMCache, and what it says of one prompt under the weights of a version."""

    def __init__(self, directory: Path) -> None:
        from psrl.rollout.engines.vllm_engine import VllmEngine

        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
        config = Qwen3Config(**sizes, **heads, max_position_embeddings=2048, tie_word_embeddings=True)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(directory)
        specs = checkpoint_specs(directory, "bfloat16")
        state = model.state_dict()
        self._weights = {v: [(name, state[name] * (1 + 0.1 * v)) for name in specs] for v in (0, 1)}
        self._prompt = tuple(torch.randint(512, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist())
        cache = LMCacheConfig(enable=True, offload_size_gb=1.0, chunk_size=CHUNK)
        settings = lmcache_settings(cache, KVTransferConfig(), instance="instance-0", ranks=1)
        with environment(settings.environment):
            self.engine = VllmEngine(
                directory,
                dtype="bfloat16",
                specs=specs,
                eos_token_ids=(),
                max_num_seqs=4,
                max_model_len=1024,
                kv_cache_tokens=4096,
                options={"enforce_eager": True, "gpu_memory_utilization": 0.1},
                run="run",
                kv_transfer_config=settings.kv_transfer_config,
                tag_versions=True,
            )

    def under(self, version: int) -> tuple[int, list[float]]:
        """Put these weights in place, which empties vLLM's own cache; tokens of the prompt that were loaded, and log-probs."""
        self.engine.update_weights(version, self._weights[version])
        before = self.engine.stats().prefix_hit_tokens
        sample = SampleRequest(sample=0, max_new_tokens=NEW, seed=0, greedy=True)
        self.engine.submit(
            GenerateRequest(
                group=version,
                min_version=version,
                incarnation=0,
                prompt_ids=self._prompt,
                sampling=SamplingParams(temperature=1.0, ignore_eos=True),
                samples=(sample,),
            )
        )
        logprobs: list[float] = []
        end = time.monotonic() + DEADLINE_S
        while self.engine.has_work():
            assert time.monotonic() < end, f"{len(logprobs)} of {NEW} tokens after {DEADLINE_S:g} s"
            wait([self.engine], 0.1)
            for chunk in self.engine.step():
                logprobs += chunk.logprobs
        assert len(logprobs) == NEW
        return self.engine.stats().prefix_hit_tokens - before, logprobs


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(tmp_path / "model")
    yield made
    made.engine.close()


def test_what_other_weights_made_is_never_loaded(asked: Asked) -> None:
    nothing, first = asked.under(0)
    loaded, again = asked.under(0)
    other, changed = asked.under(1)
    back, last = asked.under(0)
    assert nothing == other == 0, "nothing of these weights had been stored"
    assert loaded >= PROMPT - 2 * CHUNK and back >= PROMPT - 2 * CHUNK, "whole chunks come from LMCache"
    # What was loaded is what had been computed, but for bfloat16's rounding in steps of other lengths; other weights differ by more.
    assert again == pytest.approx(first, abs=0.05) and last == pytest.approx(first, abs=0.05)
    assert changed != pytest.approx(first, abs=0.05)


@pytest.mark.parametrize("mode", ["sync", "pin_sync"])
def test_a_conversation_finds_its_keys_and_values_at_another_instance(mode: str, tmp_path: Path) -> None:
    """Nothing keeps a conversation where it was: every second turn or so is made at the other one of two instances."""
    run = Run(
        tmp_path / "run",
        {
            "trainer.device": "cuda",
            "trainer.gpu_memory_fraction": 0.3,
            "trainer.total_training_steps": 3,
            "train_actor_rollout_ref.actor.use_torch_compile": "False",
            "train_actor_rollout_ref.actor.mixed_precision": "bfloat16",
            "model.tiny.hidden_size": 256,
            "model.tiny.num_heads": 4,
            "model.tiny.num_layers": 4,
            "model.tiny.warm_start_steps": 0,
            "psrl.staleness": 0,
            "psrl.deployment.n_rollout_instances": 2,
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.dtype": "bfloat16",
            f"{ROLLOUT}.enforce_eager": "True",
            f"{ROLLOUT}.gpu_memory_utilization": 0.15,
            f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": 2**30,
            f"{ROLLOUT}.ignore_eos": "True",
            f"{ROLLOUT}.agent.default_agent_loop": "tool_agent",
            f"{ROLLOUT}.multi_turn.environment": "agentic_environment:Environment",
            f"{ROLLOUT}.multi_turn.environment_params": "{turns: 8, tokens: 64, seconds: 0.05}",
            f"{ROLLOUT}.multi_turn.max_tokens_per_turn": 8,
            f"{ROLLOUT}.multi_turn.cut_message": "go_on",
            "data.task": "agentic_environment:Chores",
            "data.task_params": "{system_tokens: 128, prompt_tokens: 32}",
            "data.max_prompt_length": 256,
            "data.max_response_length": 1024,
            "psrl.lmcache.enable": "True",
            "psrl.lmcache.enable_p2p": "True",
            "psrl.lmcache.chunk_size": CHUNK,
            "psrl.lmcache.offload_size_gb": 1,
            f"{ROUTING}.kv_transfer.enable": "True",
            f"{ROUTING}.kv_transfer.transfer_mode": mode,
        },
        module_dir=BENCHMARKS,
    )
    try:
        assert run.launch() == 0, run.story()
        assert run.audit().findings == []
        counts = [
            re.findall(r"transfers to this instance: .*moved=(\d+).*moved_tokens=(\d+)", run.log(f"instance-{i}"))
            for i in (0, 1)
        ]
        moved, tokens = (sum(int(found[-1][column]) for found in counts if found) for column in (0, 1))
        print(f"{mode}: {moved} turns found {tokens} tokens that the other instance had computed: {counts}")
        assert moved > 0 and tokens >= moved * CHUNK, run.story()
        # Wrong keys and values would put the rollout's log-probs far from the trainer's.
        assert all(abs(row["rollout_corr/kl"]) < 5e-3 for row in read_metrics(run.dir.metrics))
    finally:
        run.close()
