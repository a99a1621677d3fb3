"""LMCache within a real vLLM, on whatever this machine has: one engine and what it says of a prompt, and a run of conversations."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

CHUNK, NEW = 32, 8
ON_GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if ON_GPU else "float32"
CLOSE = 0.05 if ON_GPU else 1e-3
"""How far log-probs may be apart whose keys and values were computed in steps of other lengths."""
ON_CPU_OPTIONS = {"block_size": CHUNK}  # its usual blocks hold 128 tokens
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROLLOUT, ROUTING = "gen_actor_rollout_ref.rollout", "psrl.rollout_coordination.routing_strategy"


class Asked:
    """A real engine with LMCache, and what it says of a prompt under the weights of a version."""

    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        from psrl.rollout.engines.vllm_engine import VllmEngine

        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
        # Weights large enough that what a token's log-prob is depends on all tokens before it.
        config = Qwen3Config(**sizes, **heads, max_position_embeddings=2048, initializer_range=0.1)
        model = Qwen3ForCausalLM(config).to(getattr(torch, DTYPE))
        model.save_pretrained(directory)
        specs = checkpoint_specs(directory, DTYPE)
        state = model.state_dict()
        self._weights = {v: [(name, state[name] * (1 + 0.1 * v)) for name in specs] for v in (0, 1)}
        cache = LMCacheConfig(enable=True, offload_size_gb=1.0, chunk_size=CHUNK)
        settings = lmcache_settings(cache, KVTransferConfig(), instance="instance-0", ranks=1)
        with environment(settings.environment | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}):
            self._engine = VllmEngine(
                directory,
                dtype=DTYPE,
                specs=specs,
                eos_token_ids=(),
                max_num_seqs=4,
                max_model_len=1024,
                kv_cache_tokens=4096,
                options=options | ({"gpu_memory_utilization": 0.1} if ON_GPU else {}),
                run="run",
                kv_transfer_config=settings.kv_transfer_config,
                tag_versions=True,
            )

    def under(self, version: int, length: int) -> tuple[int, list[float]]:
        """Put these weights in place, which empties vLLM's own cache; tokens of the prompt that were loaded, and log-probs."""
        self._engine.update_weights(version, self._weights[version])
        before = self._engine.stats().prefix_hit_tokens
        self._engine.submit(
            GenerateRequest(
                group=version,
                min_version=version,
                incarnation=0,
                prompt_ids=tuple(
                    torch.randint(512, (length,), generator=torch.Generator().manual_seed(length)).tolist()
                ),
                sampling=SamplingParams(temperature=1.0, ignore_eos=True),
                samples=(SampleRequest(sample=0, max_new_tokens=NEW, seed=0, greedy=True),),
            )
        )
        logprobs: list[float] = []
        end = time.monotonic() + DEADLINE_S
        while self._engine.has_work():
            assert time.monotonic() < end, f"{len(logprobs)} of {NEW} tokens after {DEADLINE_S:g} s"
            wait([self._engine], 0.1)
            for chunk in self._engine.step():
                logprobs += chunk.logprobs
        assert len(logprobs) == NEW
        return self._engine.stats().prefix_hit_tokens - before, logprobs

    def check(self, length: int) -> None:
        """All of a prompt but its last token, in whole chunks, is loaded under the weights that made it, and nothing else is."""
        nothing, first = self.under(0, length)
        loaded, again = self.under(0, length)
        other, changed = self.under(1, length)
        back, last = self.under(0, length)
        assert nothing == other == 0
        assert loaded == back == (length - 1) // CHUNK * CHUNK
        assert again == pytest.approx(first, abs=CLOSE) and last == pytest.approx(first, abs=CLOSE)
        assert changed != pytest.approx(first, abs=CLOSE)

    def close(self) -> None:
        self._engine.close()


@contextmanager
def asked(directory: Path, options: dict[str, Any]) -> Iterator[Asked]:
    made = Asked(directory, options | ({} if ON_GPU else ON_CPU_OPTIONS))
    try:
        yield made
    finally:
        made.close()


def conversations(path: Path, mode: str, overrides: dict[str, object]) -> tuple[int, int]:
    """Run conversations that nothing keeps where they were: every second turn or so is made at the other one of two instances. How
    many turns found keys and values of the other instance there, and for how many tokens. The run has learned from the right ones."""
    run = Run(
        path,
        {
            "trainer.total_training_steps": 3,
            "train_actor_rollout_ref.actor.use_torch_compile": "False",
            "model.tiny.hidden_size": 256,
            "model.tiny.num_heads": 4,
            "model.tiny.num_layers": 4,
            "model.tiny.warm_start_steps": 0,
            "psrl.staleness": 0,
            "psrl.deployment.n_rollout_instances": 2,
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.enforce_eager": "True",
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
            **overrides,
        },
        module_dir=BENCHMARKS,
    )
    try:
        assert run.launch() == 0, run.story()
        assert run.audit().findings == []
        gaps = [abs(row["rollout_corr/kl"]) for row in read_metrics(run.dir.metrics)]
        assert len(gaps) == 3 and max(gaps) < (5e-3 if ON_GPU else 1e-4), "other keys and values than the prompt's"
        found = [re.findall(r"moved=(\d+).*moved_tokens=(\d+)", run.log(f"instance-{i}")) for i in (0, 1)]
        moved, tokens = (sum(int(counts[-1][column]) for counts in found if counts) for column in (0, 1))
        return moved, tokens
    finally:
        run.close()
