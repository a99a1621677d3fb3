"""Ten turns of one session over the official client and real engines: every captured token is what an engine saw or made,
across a pull of new weights, a migration, a client that hangs up and a request that is repeated."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import openai
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from psrl.models.load import checkpoint_specs
from psrl.models.tokenizer import load_tokenizer
from psrl.protocol.generation import FINISH_ABORT, FINISH_MIGRATED, AbortRequest, GenerateRequest, SamplingParams
from psrl.rollout import guests as guests_module
from psrl.rollout.engines.base import Engine
from psrl.rollout.engines.torch_engine import TorchEngine
from psrl.rollout.guests import Guests
from psrl.rollout.session_store import RunSessions
from psrl.rollout.trajectory import TokenLimits
from psrl.sessions.app import make_app
from psrl.sessions.serve import SessionServer
from psrl.sessions.session import SessionLimits

pytestmark = pytest.mark.process

DEADLINE_S = 240
TOKEN = "token-of-this-run"
CONTEXT = 2048
TURN_TOKENS = 14
LONG_TURN, DISTURBED = 300, (3, 5, 6)
"""Turns in which something happens have room for it: an engine decodes on while this process waits for a core."""
VLLM = (
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]


@dataclass
class Fleet:
    """Engines as instances, decoded in the event loop; everything that goes in and comes out is noted."""

    engines: dict[str, Engine]
    weights: list[tuple[str, torch.Tensor]]
    guests: Guests = field(init=False)
    there: set[str] = field(init=False)
    asked: list[tuple[str, GenerateRequest]] = field(default_factory=list)
    made: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    disturb: Callable[[], None] | None = None
    """Called once a turn has a few tokens."""

    def __post_init__(self) -> None:
        self.there = set(self.engines)
        limits = TokenLimits(context=CONTEXT, response=CONTEXT)
        self.guests = Guests(
            SamplingParams(temperature=1.0, ignore_eos=True), limits, lambda: sorted(self.there), self.send
        )

    def send(self, instance: str, request: GenerateRequest | AbortRequest) -> bool:
        if instance not in self.there:
            return False
        if isinstance(request, GenerateRequest):
            self.asked.append((instance, request))
            self.engines[instance].submit(request)
        else:
            self._hear(instance, self.engines[instance].abort(request.groups) if request.groups else [])
            self._hear(instance, self.engines[instance].abort_samples(request.samples) if request.samples else [])
        return True

    async def decode(self) -> None:
        while True:
            for name, engine in self.engines.items():
                if engine.has_work():
                    self._hear(name, engine.step())
            newest = self.asked[-1][1].samples[0].sample if self.asked else -1
            busy = any(engine.has_work() for engine in self.engines.values())
            if self.disturb is not None and busy and len(self.made[newest]) >= 3:
                disturb, self.disturb = self.disturb, None
                disturb()
            await asyncio.sleep(0.002)

    def _hear(self, name: str, chunks: list[Any], finish: str = "") -> None:
        for chunk in chunks:
            self.made[chunk.sample] += chunk.token_ids
            self.logprobs[chunk.sample] += chunk.logprobs
            if finish and chunk.finish == FINISH_ABORT:
                chunk.finish = finish
            self.guests.add(chunk, name)

    # ---- what happens in the middle of a turn ---------------------------------------------------------------------

    def pull(self) -> None:
        """All engines hand back what they have and take new weights, as an instance does."""
        for name, engine in self.engines.items():
            self._hear(name, engine.abort())
            changed = [(key, tensor * 1.05) for key, tensor in self.weights]
            engine.update_weights(engine.version + 1, changed)

    def migrate(self) -> None:
        """The busy engine hands back, and its turn goes to the other one."""
        busy = next(name for name, engine in self.engines.items() if engine.has_work())
        self.there.discard(busy)
        self._hear(busy, self.engines[busy].abort(), FINISH_MIGRATED)


def torch_engines(directory: Path) -> dict[str, Engine]:
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT, "kv_cache_tokens": 4 * CONTEXT}
    return {
        name: TorchEngine.from_pretrained(directory, dtype=torch.float32, eos_token_ids=(2,), **limits)
        for name in ("a", "b")
    }


def vllm_engines(directory: Path) -> dict[str, Engine]:
    from psrl.rollout.engines.vllm_engine import VllmEngine

    return {
        name: VllmEngine(
            directory,
            dtype="float32",
            specs=checkpoint_specs(directory, "float32"),
            eos_token_ids=(2,),
            max_num_seqs=4,
            max_model_len=CONTEXT,
            kv_cache_tokens=4 * CONTEXT,
            options={"enforce_eager": True, "gpu_memory_utilization": 0.3},
        )
        for name in ("a", "b")
    }


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with heads that vLLM's CPU kernels can work with, and its tokenizer."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_model, copy)
    (copy / "model.safetensors").unlink()
    torch.manual_seed(1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    larger = AutoConfig.from_pretrained(tiny_model, **heads, max_position_embeddings=CONTEXT)
    AutoModelForCausalLM.from_config(larger).save_pretrained(copy)
    return copy


@pytest.fixture(params=["torch", pytest.param("vllm", marks=VLLM)])
def fleet(request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fleet, Path]]:
    monkeypatch.setattr(guests_module, "ELSEWHERE_S", 0.01)
    engines = torch_engines(model) if request.param == "torch" else vllm_engines(model)
    state = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    specs = next(iter(engines.values())).weight_specs()
    made = Fleet(engines, [(name, state[name]) for name in specs])
    for engine in engines.values():
        engine.update_weights(0, made.weights)
    yield made, model
    for engine in engines.values():
        engine.close()


@contextlib.asynccontextmanager
async def served(fleet: Fleet, model: Path) -> AsyncIterator[tuple[str, RunSessions]]:
    store = RunSessions("tiny", load_tokenizer(model), fleet.guests, 1, SessionLimits())
    server = SessionServer(make_app(store, TOKEN), "127.0.0.1")
    await server.start()
    decoding = asyncio.create_task(fleet.decode())
    try:
        yield server.url, store
    finally:
        decoding.cancel()
        await server.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await decoding


def most(turn: int) -> int:
    """Tokens of a turn."""
    return LONG_TURN if turn in DISTURBED else TURN_TOKENS


async def hang_up(url: str, body: dict[str, Any], fleet: Fleet) -> None:
    """Ask for a streamed turn and leave in the middle of it."""
    before = len(fleet.asked)
    async with (
        httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}, timeout=DEADLINE_S) as http,
        http.stream("POST", f"{url}/chat/completions", json=body | {"stream": True}) as answer,
    ):
        async for _ in answer.aiter_bytes():
            if len(fleet.asked) > before:
                break
    while any(engine.has_work() for engine in fleet.engines.values()):
        await asyncio.sleep(0.01)


async def converse(fleet: Fleet, model: Path) -> None:
    async with served(fleet, model) as (url, store):  # noqa: SIM117
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}, timeout=DEADLINE_S) as http:
            created = (await http.post(f"{url}/sessions")).json()
            base = created["base_url"]
            client = openai.AsyncOpenAI(base_url=base, api_key=TOKEN, max_retries=0, timeout=DEADLINE_S)
            messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1 ="}]
            prompts: list[tuple[int, ...]] = []
            numbers: list[int] = []
            for turn in range(10):
                body = {"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": most(turn)}
                if turn == 6:
                    await hang_up(base, body, fleet)
                first = len(fleet.asked)
                fleet.disturb = {3: fleet.pull, 5: fleet.migrate}.get(turn)
                if turn % 2:
                    stream = await client.chat.completions.create(**body, stream=True, logprobs=True)
                    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
                    message = {"role": "assistant", "content": text}
                else:
                    reply = await client.chat.completions.create(**body, logprobs=True)
                    message = reply.choices[0].message.model_dump(exclude_none=True)
                    message.setdefault("content", "")
                prompts.append(fleet.asked[first][1].prompt_ids)
                numbers.append(fleet.asked[first][1].samples[0].sample)
                follow = {"role": "tool", "tool_call_id": "c", "content": f"{turn}"} if turn % 3 == 2 else None
                messages = [*messages, message, follow or {"role": "user", "content": f"{turn} + 1 ="}]
            state = (await http.get(f"{url}/sessions/{created['id']}")).json()
            assert (await http.delete(f"{url}/sessions/{created['id']}")).status_code == 200
            assert store.sessions == {} and fleet.guests._here == {}

    assert fleet.disturb is None
    [branch] = state["branches"]
    ids = [*branch["prompt_ids"], *branch["response_ids"]]
    # Each turn's prompt is all that came before it, what the engines had made included; nothing was tokenised again.
    ends = 0
    for turn, (prompt, number) in enumerate(zip(prompts, numbers, strict=True)):
        made = fleet.made[number]
        assert list(prompt) == ids[: len(prompt)] and len(prompt) > ends
        assert 0 < len(made) <= most(turn) and ids[len(prompt) : len(prompt) + len(made)] == made
        ends = len(prompt) + len(made)
    assert ends == len(ids)
    by_model = [token for token, mask in zip(branch["response_ids"], branch["response_mask"], strict=True) if mask]
    assert by_model == [token for number in numbers for token in fleet.made[number]]
    scores = [s for s, mask in zip(branch["rollout_log_probs"], branch["response_mask"], strict=True) if mask]
    assert scores == pytest.approx([s for number in numbers for s in fleet.logprobs[number]])
    # Other weights from the pull on, in the middle of the fourth turn.
    versions = [
        next((v for start, end, v in branch["spans"] if start <= i < end), None)
        for i, mask in enumerate(branch["response_mask"])
        if mask
    ]
    before = sum(len(fleet.made[number]) for number in numbers[:3])
    cut = versions.index(1)
    assert versions == [0] * cut + [1] * (len(versions) - cut)
    assert before + 3 <= cut <= before + len(fleet.made[numbers[3]])
    # What had been made when a turn moved went along.
    moved = {
        number: [r for _, r in fleet.asked if r.samples[0].sample == number] for number in (numbers[3], numbers[5])
    }
    for number, requests in moved.items():
        assert len(requests) == 2 and len(requests[1].samples[0].prefix_ids) >= 3
        assert list(requests[1].samples[0].prefix_ids) == fleet.made[number][: len(requests[1].samples[0].prefix_ids)]
    [there, elsewhere] = [instance for instance, r in fleet.asked if r.samples[0].sample == numbers[5]]
    assert there != elsewhere
    # The turn that the client hung up on was aborted, and left nothing behind.
    given_up = {r.samples[0].sample for _, r in fleet.asked} - set(numbers)
    assert len(given_up) == 1 and len(fleet.made[given_up.pop()]) < LONG_TURN


def test_ten_turns_are_captured_token_for_token(fleet: tuple[Fleet, Path]) -> None:
    asyncio.run(asyncio.wait_for(converse(*fleet), DEADLINE_S))
