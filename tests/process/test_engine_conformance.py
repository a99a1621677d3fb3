"""What every Engine must do, on real models with random weights. To check another engine, add it to ENGINES.

An engine is built from a Hugging Face directory; transformers itself, on the same directory, is the reference. vLLM starts in
tens of seconds: its tests share two engines and leave out what would need a third.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from psrl.models.load import checkpoint_specs
from psrl.net.waiting import wait
from psrl.protocol.blocks import block_names
from psrl.protocol.generation import CacheEvents, GenerateRequest, SampleRequest, SamplingParams, TokenChunk
from psrl.protocol.samples import VersionSpan
from psrl.rollout.engines.base import Engine
from psrl.rollout.engines.torch_engine import TorchEngine
from psrl.rollout.held_blocks import HeldBlocks
from psrl.rollout.preemption import PreemptionWatch

pytestmark = pytest.mark.process

VOCAB = 61
EOS = 7
MAX_STEPS = 3000
BLOCK = 16
"""Tokens of a block in which an engine tells what it caches."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, ignore_eos=True)


def torch_engine(directory: Path, dtype: torch.dtype = torch.float32, **limits: int) -> Engine:
    return TorchEngine.from_pretrained(directory, dtype=dtype, eos_token_ids=(EOS,), **limits)


class TorchEngines:
    """A new engine each time."""

    draws_repeat = True
    """A continuation goes on with the draws of an uninterrupted sample, whatever its neighbours."""
    keeps_step = True
    """It decodes within `step`, so that a test sees every token before the next one is made."""
    filters_log_probs = draws_together = False

    def __init__(self, directories: dict[str, Path]) -> None:
        self._directories = directories
        self._built: list[Engine] = []

    def __call__(
        self, model: str = "qwen3", *, rows: int = 8, context: int = 128, kv: int | None = None, **more: Any
    ) -> Engine:
        limits = {"max_num_seqs": rows, "max_model_len": context, "kv_cache_tokens": kv or rows * context}
        self._built.append(torch_engine(self._directories[model], **limits, **more))
        return self._built[-1]

    def after_test(self) -> None:
        for engine in self._built:
            engine.close()
        self._built.clear()

    close = after_test


class VllmEngines:
    """Two engines for all tests, with the weights of the directory and version -1 at the start of each."""

    draws_repeat = keeps_step = False
    filters_log_probs = draws_together = True
    SHARED: ClassVar = {"roomy": (8, 128, 1024), "tight": (8, 64, 128)}

    def __init__(self, directories: dict[str, Path]) -> None:
        self._directory = directories["qwen3"]
        self._built: dict[str, Engine] = {}

    def __call__(
        self, model: str = "qwen3", *, rows: int = 8, context: int = 128, kv: int | None = None, **more: Any
    ) -> Engine:
        more.pop("block_size", None)  # both tell what they cache, in blocks of BLOCK tokens
        if model != "qwen3" or context > 128 or more:
            pytest.skip("would need one more vLLM engine, which takes half a minute")
        name = "tight" if kv is not None and kv < rows * context else "roomy"
        if name not in self._built:
            self._built[name] = self._start(*self.SHARED[name])
        engine = self._built[name]
        if engine.version != -1:
            model_there = AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32)
            engine.update_weights(-1, weights_for(engine, model_there))
        return engine

    def _start(self, rows: int, context: int, kv: int) -> Engine:
        from psrl.rollout.engines.vllm_engine import VllmEngine

        engine = VllmEngine(
            self._directory,
            dtype="float32",
            specs=checkpoint_specs(self._directory, "float32"),
            eos_token_ids=(EOS,),
            max_num_seqs=rows,
            max_model_len=context,
            kv_cache_tokens=kv,
            options={
                "enforce_eager": True,
                "max_num_batched_tokens": 160,  # a prompt and a bit
                "block_size": 32,
                "num_gpu_blocks_override": kv // 32 + 1,
                "gpu_memory_utilization": 0.3,
            },
            block_size=BLOCK,
        )
        engine.version = -2  # the weights are random
        return engine

    def after_test(self) -> None:
        for engine in self._built.values():
            while engine.has_work():
                with contextlib.suppress(RuntimeError):  # tokens of weights that had diverged
                    engine.abort()

    def close(self) -> None:
        for engine in self._built.values():
            engine.close()


ENGINES: dict[str, type[TorchEngines] | type[VllmEngines]] = {"torch": TorchEngines, "vllm": VllmEngines}
VLLM = (
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
)

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(
        **SIZES | {"head_dim": 32}, **HEADS, tie_word_embeddings=True
    ),  # vLLM's CPU kernels: 32 at least
    "experts": Qwen3MoeConfig(
        **SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "llama": LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=1024, initializer_range=0.3),
    "sliding": MistralConfig(**SIZES, **HEADS, sliding_window=6),
    "part_sliding": Qwen2Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        **HEADS,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    ),
}


@dataclass
class Output:
    """All chunks of one sample put together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""

    def add(self, chunk: TokenChunk) -> None:
        assert not self.finish, "a chunk after the last one"
        start = len(self.tokens)
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs
        for span in chunk.spans:
            assert isinstance(span, VersionSpan) and span.start == len(self.versions) < span.end
            self.versions += [span.version] * (span.end - span.start)
        assert start + len(chunk.token_ids) == len(self.logprobs) == len(self.versions) == len(self.tokens)
        self.finish = chunk.finish


Outputs = dict[tuple[int, int], Output]


def collect(outputs: Outputs, chunks: Iterable[TokenChunk]) -> None:
    for chunk in chunks:
        outputs.setdefault((chunk.group, chunk.sample), Output()).add(chunk)


def step(engine: Engine) -> list[TokenChunk]:
    """As an instance's loop does: wait until there may be something, then ask."""
    wait([engine], 10.0)
    return engine.step()


def run(engine: Engine, outputs: Outputs | None = None, *, steps: int = MAX_STEPS) -> Outputs:
    """Step until nothing is left, or `steps` times."""
    outputs = {} if outputs is None else outputs
    for _ in range(steps):
        if not engine.has_work():
            break
        collect(outputs, step(engine))
    assert steps < MAX_STEPS or not engine.has_work(), "the engine does not come to an end"
    return outputs


def run_until(engine: Engine, outputs: Outputs, tokens: int) -> None:
    """Step until some sample has this many tokens."""
    for _ in range(MAX_STEPS):
        collect(outputs, step(engine))
        if max((len(o.tokens) for o in outputs.values()), default=0) >= tokens:
            return
    pytest.fail(f"no sample reached {tokens} tokens in {MAX_STEPS} steps")


def request(
    group: int,
    prompt: Sequence[int],
    budgets: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    prefixes: Sequence[Sequence[int]] = (),
    min_version: int = -1,
) -> GenerateRequest:
    samples = tuple(
        SampleRequest(
            sample=i,
            max_new_tokens=budget,
            seed=1000 * group + i,
            prefix_ids=tuple(prefixes[i]) if prefixes else (),
        )
        for i, budget in enumerate(budgets)
    )
    return GenerateRequest(
        group=group,
        min_version=min_version,
        incarnation=0,
        prompt_ids=tuple(prompt),
        sampling=sampling,
        samples=samples,
    )


def prompt(length: int, salt: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(100 * length + salt)).tolist()


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def plain_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], response: Sequence[int], temperature: float
) -> list[float]:
    """Log-probs of `response` by one forward over the whole sequence, no cache."""
    ids = torch.tensor([[*prompt_ids, *response]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].float()
    scores = torch.log_softmax(logits / (temperature or 1.0), -1)
    at = torch.arange(len(prompt_ids) - 1, ids.shape[1] - 1)
    return scores[at, ids[0, at + 1]].tolist()


def generated(model: PreTrainedModel, prompt_ids: Sequence[int], budget: int, eos: int | None = None) -> list[int]:
    ids = torch.tensor([list(prompt_ids)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=budget,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(prompt_ids) :].tolist()


def weights_for(engine: Engine, model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    state = model.state_dict()
    return [(name, state[name].to(dtype)) for name, (_, dtype) in engine.weight_specs().items()]


Build = TorchEngines | VllmEngines


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        make_model(config, seed=3).save_pretrained(root / name)
    return {name: root / name for name in MODELS}


@pytest.fixture(scope="module", params=["torch", pytest.param("vllm", marks=VLLM)])
def engines(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[Build]:
    made = ENGINES[request.param](directories)
    yield made
    made.close()


@pytest.fixture
def build(engines: Build) -> Iterator[Build]:
    """Builds engines of one implementation; after the test they are closed or idle."""
    yield engines
    engines.after_test()


@pytest.fixture
def reference(directories: dict[str, Path]) -> Callable[[str], PreTrainedModel]:
    return lambda name: AutoModelForCausalLM.from_pretrained(directories[name], dtype=torch.float32).eval()


# ---- what is generated -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MODELS))
def test_greedy_equals_generate_while_samples_join_and_leave(
    name: str, build: Build, reference: Callable[[str], PreTrainedModel]
) -> None:
    model = reference(name)
    # (prompt length, budget): fewer rows than samples, so they leave at different steps and others take their rows.
    jobs = [(5, 9), (1, 20), (17, 3), (2, 30), (9, 1), (30, 12), (4, 25), (11, 6), (3, 17)]
    prompts = [prompt(length, salt) for salt, (length, _) in enumerate(jobs)]
    expected = [generated(model, p, budget) for p, (_, budget) in zip(prompts, jobs, strict=True)]
    engine, outputs = build(name, rows=4), {}
    for group, (p, (_, budget)) in enumerate(zip(prompts, jobs, strict=True)):
        engine.submit(request(group, p, [budget]))
        run(engine, outputs, steps=2)
    run(engine, outputs)
    assert [outputs[group, 0].tokens for group in range(len(jobs))] == expected
    assert {o.finish for o in outputs.values()} == {"length"}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLED,
        SamplingParams(ignore_eos=True),
        GREEDY,
        SamplingParams(temperature=1.3, top_p=0.7, top_k=9, ignore_eos=True),
    ],
)
def test_log_probs_equal_a_plain_forward(
    name: str, sampling: SamplingParams, build: Build, reference: Callable[[str], PreTrainedModel]
) -> None:
    if build.filters_log_probs and (sampling.top_p < 1 or sampling.top_k > 0):
        pytest.skip("says log-probs of what the filter has left: refused in the configuration")
    engine = build(name)
    prompts = {group: prompt(length) for group, length in enumerate((1, 6, 23))}
    for group, p in prompts.items():
        engine.submit(request(group, p, [25, 40, 13], sampling))
    outputs = run(engine)
    assert len(outputs) == 9
    for (group, _), output in outputs.items():
        expected = plain_logprobs(reference(name), prompts[group], output.tokens, sampling.temperature)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_sample_does_not_depend_on_its_neighbours(build: Build) -> None:
    alone = run(_submitted(build(), request(1, prompt(6), [20], SAMPLED)))[1, 0]
    crowd = [request(g, prompt(3 + g), [30, 10], SamplingParams(top_p=0.5)) for g in (2, 3)]
    crowded = run(_submitted(build(rows=5), *crowd[:1], request(1, prompt(6), [20, 20, 20], SAMPLED), *crowd[1:]))
    assert crowded[1, 0].tokens == alone.tokens
    assert len({tuple(crowded[1, i].tokens) for i in range(3)}) == 3, "seeds make the samples of a group differ"


def test_samples_drawn_together_differ_each_time_and_exact_ones_do_not(
    build: Build, monkeypatch: pytest.MonkeyPatch, reference: Callable[[str], PreTrainedModel]
) -> None:
    if not build.draws_together:
        pytest.skip("this engine always draws by the seeds")
    engine = build()
    monkeypatch.setattr(engine, "seed_samples", False)
    loose = request(1, prompt(6), [20, 20], SAMPLED)
    exact = msgspec.structs.replace(loose, samples=tuple(msgspec.structs.replace(s, exact=True) for s in loose.samples))
    for asked, alike in ((loose, False), (exact, True)):
        first, second = (run(_submitted(engine, asked)) for _ in range(2))
        assert (first[1, 0].tokens == second[1, 0].tokens) is alike
        assert first[1, 0].tokens != first[1, 1].tokens
        expected = plain_logprobs(reference("qwen3"), prompt(6), first[1, 0].tokens, SAMPLED.temperature)
        assert first[1, 0].logprobs == pytest.approx(expected, abs=1e-5)


def test_a_greedy_sample_stands_beside_sampled_ones(build: Build) -> None:
    sampled = request(1, prompt(6), [20, 20], SAMPLED)
    mixed = msgspec.structs.replace(
        sampled, samples=(sampled.samples[0], msgspec.structs.replace(sampled.samples[1], greedy=True))
    )
    outputs = run(_submitted(build(), mixed))
    if build.draws_repeat:
        assert outputs[1, 0].tokens == run(_submitted(build(), sampled))[1, 0].tokens
    alone = run(_submitted(build(), request(1, prompt(6), [20, 20])))
    assert outputs[1, 1].tokens == alone[1, 1].tokens
    assert outputs[1, 1].logprobs == pytest.approx(alone[1, 1].logprobs, abs=1e-5)


def _submitted(engine: Engine, *requests: GenerateRequest) -> Engine:
    for item in requests:
        engine.submit(item)
    return engine


def test_stop_tokens_end_a_sample_and_belong_to_it(build: Build, reference: Callable[[str], PreTrainedModel]) -> None:
    free = generated(reference("qwen3"), prompt(5), 20)
    stop = free[4]
    cut = free[: free.index(stop) + 1]
    sampled = SamplingParams(temperature=1.5)
    stopping = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    outputs = run(
        _submitted(
            build(rows=40),
            request(0, prompt(5), [20], stopping),
            request(1, prompt(5), [20]),
            request(2, prompt(9), [60] * 16, sampled),
            request(3, prompt(9), [60] * 16, SamplingParams(temperature=1.5, ignore_eos=True)),
        )
    )
    assert (outputs[0, 0].tokens, outputs[0, 0].finish) == (cut, "stop")
    assert (outputs[1, 0].tokens, outputs[1, 0].finish) == (free, "length")
    for i in range(16):
        eos_at = [k for k, token in enumerate(outputs[2, i].tokens) if token == EOS]
        assert eos_at == ([len(outputs[2, i].tokens) - 1] if outputs[2, i].finish == "stop" else [])
        assert outputs[3, i].finish == "length"
    assert "stop" in {outputs[2, i].finish for i in range(16)}
    assert any(EOS in outputs[3, i].tokens for i in range(16)), "ignore_eos goes on past the end token"


# ---- limits ------------------------------------------------------------------------------------------------------


def test_the_context_is_a_boundary_and_the_engine_lives_on(build: Build) -> None:
    engine = build(context=64, kv=128)
    for group, length in enumerate((63, 64, 65)):
        engine.submit(request(group, prompt(length), [10]))
    engine.submit(request(3, prompt(52), [10, 10], prefixes=[prompt(11), prompt(12)]))
    engine.submit(request(4, prompt(4), [0, -17]))
    engine.submit(request(5, prompt(4), [3]))
    outputs = run(engine)
    lengths = {key: len(output.tokens) for key, output in outputs.items()}
    assert lengths == {(0, 0): 1, (1, 0): 0, (2, 0): 0, (3, 0): 1, (3, 1): 0, (4, 0): 0, (4, 1): 0, (5, 0): 3}
    assert {output.finish for output in outputs.values()} == {"length"}


def test_a_request_that_cannot_be_decoded_ends_without_tokens(build: Build) -> None:
    engine = build()
    engine.submit(request(0, [], [5]))
    engine.submit(request(1, [3, VOCAB], [5]))
    engine.submit(request(2, [3, -1], [5]))
    engine.submit(request(3, [3], [5], prefixes=[[10**9]]))
    engine.submit(request(4, [3], [5], SamplingParams(temperature=-1.0)))
    engine.submit(request(5, [3], [5]))
    outputs = run(engine)
    assert [len(outputs[group, 0].tokens) for group in range(6)] == [0, 0, 0, 0, 0, 5]
    assert {output.finish for output in outputs.values()} == {"length"}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_preemption_under_a_tiny_budget_changes_no_token(sampling: SamplingParams, build: Build) -> None:
    work = [request(group, prompt(6, group), [40, 50], sampling) for group in range(4)]
    roomy = build(rows=8, context=64)
    tight = build(rows=8, context=64, kv=128)
    expected, outputs = run(_submitted(roomy, *work)), run(_submitted(tight, *work))
    assert roomy.stats().preemptions == 0
    assert tight.stats().preemptions > 0
    assert {k: o.tokens for k, o in outputs.items()} == {k: o.tokens for k, o in expected.items()}


def test_what_waits_after_a_preemption_goes_on_elsewhere_as_if_uninterrupted(build: Build) -> None:
    sampling = SAMPLED if build.draws_repeat else GREEDY
    prompts = {group: prompt(6, group) for group in range(4)}
    expected = run(_submitted(build(context=64), *(request(g, p, [40, 40], sampling) for g, p in prompts.items())))
    tight, watch, outputs = build(context=64, kv=128), PreemptionWatch(limit=0), Outputs()
    watch.hands_back(tight.stats())  # what had been preempted before does not count
    _submitted(tight, *(request(g, p, [40, 40], sampling) for g, p in prompts.items()))
    while not watch.hands_back(tight.stats()):
        collect(outputs, step(tight))
    handed_back = tight.abort_waiting()
    assert handed_back and all(chunk.finish == "abort" for chunk in handed_back)
    collect(outputs, handed_back)
    assert tight.stats().waiting == 0
    assert tight.stats().running > 0 or not build.keeps_step
    assert not watch.hands_back(tight.stats())
    other = build(context=64)
    for chunk in handed_back:
        so_far = outputs[chunk.group, chunk.sample].tokens
        rest = SampleRequest(
            sample=chunk.sample,
            max_new_tokens=40 - len(so_far),
            seed=1000 * chunk.group + chunk.sample,
            prefix_ids=tuple(so_far),
        )
        other.submit(msgspec.structs.replace(request(chunk.group, prompts[chunk.group], [], sampling), samples=(rest,)))
    continued = run(other)
    run(tight, outputs)
    for key, output in expected.items():
        assert [t for made in (outputs, continued) if key in made for t in made[key].tokens] == output.tokens


def test_many_long_continuations_at_once(build: Build, reference: Callable[[str], PreTrainedModel]) -> None:
    """More tokens to recompute than one prefill takes: all come back and go on as if uninterrupted."""
    model, start = reference("qwen3"), prompt(8)
    prefixes = [prompt(100 + 37 * i) for i in range(12)]
    engine = build(rows=12, context=600)
    outputs = run(_submitted(engine, request(0, start, [5] * 12, prefixes=prefixes)))
    for i, prefix in enumerate(prefixes):
        assert outputs[0, i].tokens == generated(model, start + prefix, 5)


def test_drawn_samples_whose_prompts_fill_several_batches(build: Build) -> None:
    """More prompt tokens than one prefill takes, each sample with a seed of its own."""
    engine = build(rows=8)
    outputs = run(_submitted(engine, *(request(group, prompt(110, group), [6], SAMPLED) for group in range(8))))
    assert [len(outputs[group, 0].tokens) for group in range(8)] == [6] * 8


# ---- interruption ------------------------------------------------------------------------------------------------


def test_abort_and_continuation_equal_an_uninterrupted_run(build: Build) -> None:
    budgets, sampling = [110, 105, 100], SAMPLED if build.draws_repeat else GREEDY
    work = [request(group, prompt(5 + group), budgets, sampling) for group in range(3)]
    expected = run(_submitted(build(rows=7), *work))
    engine, outputs = _submitted(build(rows=7), *work), {}
    run_until(engine, outputs, tokens=12)
    last = engine.abort([0, 2])
    assert all(chunk.finish == "abort" for chunk in last)
    assert sorted((c.group, c.sample) for c in last) == [(g, i) for g in (0, 2) for i in range(3)]  # waiting ones too
    collect(outputs, last)
    begun = {key: outputs.pop(key) for key in [(g, i) for g in (0, 2) for i in range(3)]}
    for group in (2, 0):
        made = [begun[group, i].tokens for i in range(3)]
        left = [budget - len(tokens) for budget, tokens in zip(budgets, made, strict=True)]
        engine.submit(request(group, prompt(5 + group), left, sampling, prefixes=made))
    run(engine, outputs)
    for key, whole in expected.items():
        first = begun.get(key, Output())
        assert first.tokens + outputs[key].tokens == whole.tokens
        assert first.logprobs + outputs[key].logprobs == pytest.approx(whole.logprobs, abs=1e-5)
        assert outputs[key].finish == "length"


def test_one_sample_of_a_group_can_be_aborted(build: Build) -> None:
    engine, outputs = _submitted(build(rows=8), request(0, prompt(4), [100] * 3), request(1, prompt(5), [100] * 2)), {}
    run_until(engine, outputs, tokens=6)
    last = engine.abort_samples({(0, 1), (1, 0), (7, 7)})
    assert sorted((c.group, c.sample, c.finish) for c in last) == [(0, 1, "abort"), (1, 0, "abort")]
    collect(outputs, last)
    run(engine, outputs)
    assert {key: output.finish for key, output in outputs.items()} == {
        (0, 0): "length",
        (0, 1): "abort",
        (0, 2): "length",
        (1, 0): "abort",
        (1, 1): "length",
    }


def test_abort_of_everything_empties_the_engine(build: Build) -> None:
    engine, outputs = _submitted(build(rows=2), request(0, prompt(4), [100] * 3), request(1, prompt(4), [100])), {}
    assert engine.abort([7]) == []
    run_until(engine, outputs, tokens=3)
    collect(outputs, engine.abort())
    assert not engine.has_work()
    assert {key: output.finish for key, output in outputs.items()} == dict.fromkeys(
        [(0, 0), (0, 1), (0, 2), (1, 0)], "abort"
    )
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert len(run(_submitted(engine, request(2, prompt(4), [3])))[2, 0].tokens) == 3


# ---- weights -----------------------------------------------------------------------------------------------------


def test_an_older_engine_refuses_a_younger_group(build: Build, reference: Callable[[str], PreTrainedModel]) -> None:
    engine = build()
    assert engine.version == -1
    engine.submit(request(0, prompt(4), [5, 5], min_version=0))
    outputs = run(engine)
    assert {(o.finish, len(o.tokens)) for o in outputs.values()} == {("refused", 0)}
    assert len(outputs) == 2
    engine.update_weights(3, weights_for(engine, reference("qwen3")))
    for group, min_version, finish in ((1, 4, "refused"), (2, 3, "length"), (3, 0, "length")):
        engine.submit(request(group, prompt(4), [5], min_version=min_version))
        assert run(engine)[group, 0].finish == finish


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_new_weights_between_two_tokens(name: str, build: Build, reference: Callable[[str], PreTrainedModel]) -> None:
    """Running samples go on with KV recomputed under the new weights; spans tell which version sampled which token."""
    models = {-1: reference(name), 0: make_model(MODELS[name], seed=20), 1: make_model(MODELS[name], seed=21)}
    engine, outputs = build(name, rows=5), {}
    long = 30 if build.keeps_step else 110  # it decodes on while this process waits for a core
    for group in range(2):
        engine.submit(request(group, prompt(7 + group), [long, 20, long], SAMPLED))
    for version, tokens in ((0, 5), (1, 14)):
        run_until(engine, outputs, tokens=tokens)
        engine.update_weights(version, weights_for(engine, models[version]))
        assert engine.version == version
    run(engine, outputs)
    versions = outputs[0, 0].versions
    assert versions == sorted(versions) and set(versions) == {-1, 0, 1}
    if build.keeps_step:
        assert versions == [-1] * 5 + [0] * 9 + [1] * 16
    for (group, _), output in outputs.items():
        assert output.finish == "length"
        for version, model in models.items():
            scores = plain_logprobs(model, prompt(7 + group), output.tokens, SAMPLED.temperature)
            at = [k for k, v in enumerate(output.versions) if v == version]
            assert [output.logprobs[k] for k in at] == pytest.approx([scores[k] for k in at], abs=1e-5)


def test_weight_specs_name_each_tensor_once(build: Build, reference: Callable[[str], PreTrainedModel]) -> None:
    for name, tied in (("qwen3", True), ("llama", False)):
        specs, state = build(name).weight_specs(), reference(name).state_dict()
        assert set(state) - set(specs) == ({"lm_head.weight"} if tied else set())
        assert all(specs[n] == (tuple(state[n].shape), torch.float32) for n in specs)


def _rename(weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [("b.weight" if name == "model.norm.weight" else name, tensor) for name, tensor in weights]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_rename, r"unexpected b\.weight; missing model\.norm\.weight"),
        (lambda w: w[:-1], r"missing model\.norm\.weight$"),
        (lambda w: [], r"missing .*, .* and \d+ more"),
        (lambda w: [*w, w[0]], r"given twice model\.embed_tokens\.weight"),
        (
            lambda w: [(n, t.double()) for n, t in w],
            r"model\.embed_tokens\.weight is float64\[61, 32\] but must be float32\[61, 32\].* more",
        ),
        (lambda w: [(n, t[:-1]) for n, t in w[:1]] + w[1:], r"is float32\[60, 32\] but must be float32\[61, 32\]$"),
    ],
)
def test_wrong_weights_change_nothing(
    spoil: Callable[[list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]], message: str, build: Build
) -> None:
    engine, other = build(), make_model(MODELS["qwen3"], seed=20)
    engine.update_weights(4, weights_for(engine, other))
    before = run(_submitted(engine, request(0, prompt(5), [20])))[0, 0]
    with pytest.raises(ValueError, match=message):
        engine.update_weights(5, iter(spoil(weights_for(engine, make_model(MODELS["qwen3"], seed=21)))))
    assert engine.version == 4
    after = run(_submitted(engine, request(0, prompt(5), [20])))[0, 0]
    assert (after.tokens, after.logprobs, after.versions) == (before.tokens, before.logprobs, [4] * 20)


def test_a_bfloat16_engine_takes_bfloat16_only(build: Build, reference: Callable[[str], PreTrainedModel]) -> None:
    engine = build(dtype=torch.bfloat16)
    assert {dtype for _, dtype in engine.weight_specs().values()} == {torch.bfloat16}
    new = make_model(MODELS["qwen3"], seed=20)
    with pytest.raises(ValueError, match=r"is float32\[.*\] but must be bfloat16\["):
        engine.update_weights(0, [(n, t.float()) for n, t in weights_for(engine, new)])
    assert engine.version == -1
    engine.update_weights(0, weights_for(engine, new))
    output = run(_submitted(engine, request(0, prompt(5), [20], SAMPLED)))[0, 0]
    expected = plain_logprobs(new.to(torch.bfloat16), prompt(5), output.tokens, SAMPLED.temperature)
    assert output.logprobs == pytest.approx(expected, abs=0.3)
    assert output.versions == [0] * 20


def test_diverged_weights_are_an_error_not_a_token(build: Build) -> None:
    engine = build()
    spoiled = [
        (name, torch.full_like(tensor, torch.nan))
        for name, tensor in weights_for(engine, make_model(MODELS["qwen3"], 1))
    ]
    engine.update_weights(9, spoiled)
    engine.submit(request(0, prompt(5), [5]))
    with pytest.raises(RuntimeError, match="version 9"):
        run(engine)


# ---- figures -----------------------------------------------------------------------------------------------------


def test_statistics(build: Build) -> None:
    engine = build(rows=8, context=64)
    before = engine.stats()
    assert not engine.has_work()
    engine.submit(request(0, prompt(10), [50] * 9))
    assert engine.has_work()
    outputs: Outputs = {}
    run_until(engine, outputs, tokens=2)
    while not engine.stats().waiting and len(outputs[0, 0].tokens) < 40:  # its first steps may not have had all nine
        collect(outputs, step(engine))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (8, 1, 0)
    assert stats.generated_tokens - before.generated_tokens == sum(len(o.tokens) for o in outputs.values())
    assert 0 < stats.kv_usage <= 1 and stats.kv_tokens <= stats.kv_capacity_tokens
    run(engine, outputs)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage, stats.kv_tokens) == (0, 0, 0.0, 0)
    assert stats.generated_tokens - before.generated_tokens == 450
    assert stats.prompt_tokens - before.prompt_tokens >= 10
    assert stats.busy_s > before.busy_s


# ---- the prefix cache ---------------------------------------------------------------------------------------------


class Listener:
    """Hears what an engine caches, and asks it for sequences."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.held, self.removed, self.cleared = engine, HeldBlocks(), set[int](), False

    def hear(self, until: Callable[[], bool]) -> None:
        """Until that holds: an engine in another process may say it a moment after the tokens."""
        deadline = time.monotonic() + 20.0
        while True:
            events = self.engine.cache_events() or CacheEvents()
            self.held.apply(events)
            self.removed.update(events.removed)
            self.cleared = self.cleared or events.cleared
            if until():
                return
            assert time.monotonic() < deadline, f"{len(self.held)} blocks are held"
            time.sleep(0.01)

    def holds(self, tokens: Sequence[int]) -> int:
        """Blocks of this sequence, from its first one on, of all that a request for it can hit."""
        return sum(1 for _ in takewhile(self.held.__contains__, block_names(tokens[:-1], BLOCK)))

    def ask(self, group: int, tokens: Sequence[int], budget: int = 10) -> tuple[Output, int, int]:
        """What the sequence goes on with; its tokens that were found in the cache, and those that were computed."""
        before = self.engine.stats()
        output = run(_submitted(self.engine, request(group, tokens, [budget])))[group, 0]
        after = self.engine.stats()
        hit = after.prefix_hit_tokens - before.prefix_hit_tokens
        return output, hit, after.prompt_tokens - before.prompt_tokens


@pytest.fixture
def listener(build: Build, reference: Callable[[str], PreTrainedModel]) -> Listener:
    """To an engine that has cached nothing yet."""
    return emptied(build(block_size=BLOCK), reference("qwen3"))


def emptied(engine: Engine, model: PreTrainedModel) -> Listener:
    engine.update_weights(engine.version + 1, weights_for(engine, model))
    listener = Listener(engine)
    listener.hear(lambda: True)
    assert len(listener.held) == 0
    return listener


def test_a_second_turn_hits_all_whole_blocks_of_the_first(
    listener: Listener, reference: Callable[[str], PreTrainedModel]
) -> None:
    first = prompt(40)
    output, hit, computed = listener.ask(0, first, 25)
    assert (hit, computed) == (0, 40)
    told = [*first, *output.tokens]
    listener.hear(lambda: len(listener.held) >= 4)
    assert {n for n in block_names(told, BLOCK) if n in listener.held} == set(block_names(told[:64], BLOCK))
    second = [*told, *prompt(9)]
    output, hit, computed = listener.ask(1, second)
    assert (hit, computed) == (64, 74 - 64)
    assert output.tokens == generated(reference("qwen3"), second, 10)
    assert output.logprobs == pytest.approx(plain_logprobs(reference("qwen3"), second, output.tokens, 0.0), abs=1e-5)
    _, hit, _ = listener.ask(2, [*prompt(1, 5), *second])
    assert hit == 0, "the same tokens after others are not the same"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_log_probs_of_a_hit_equal_those_without(
    name: str, build: Build, reference: Callable[[str], PreTrainedModel]
) -> None:
    """Turns of different lengths at once, beside a sequence that hits nothing and one that is cached but for its last token."""
    model, engine = reference(name), build(name, rows=6, block_size=BLOCK)
    listener = emptied(engine, model)
    firsts = [(33, 3), (70, 12), (17, 30), (50, 15)]
    sequences = []
    for group, (length, budget) in enumerate(firsts):
        output, _, _ = listener.ask(group, prompt(length, 3), budget)
        sequences.append([*prompt(length, 3), *output.tokens, *prompt(1 + 5 * group, 4)])
    sequences += [prompt(21, 9), [*prompt(50, 3)[:48], 5]]
    before = engine.stats().prefix_hit_tokens
    work = [request(9 + i, s, [12, 8], SAMPLED) for i, s in enumerate(sequences)]
    outputs = run(_submitted(engine, *work))
    assert engine.stats().prefix_hit_tokens - before >= 32 + 64 + 32 + 64 + 0 + 32
    for (group, _), output in outputs.items():
        expected = plain_logprobs(model, sequences[group - 9], output.tokens, SAMPLED.temperature)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)


def test_new_weights_leave_nothing_that_could_be_hit(
    listener: Listener, reference: Callable[[str], PreTrainedModel]
) -> None:
    tokens, other = prompt(70), make_model(MODELS["qwen3"], seed=20)
    listener.ask(0, tokens)
    listener.hear(lambda: listener.holds(tokens) == 4)
    assert listener.ask(1, tokens)[1] == 64
    _submitted(listener.engine, request(2, tokens, [40]))
    run_until(listener.engine, {}, tokens=3)
    listener.engine.abort()
    listener.engine.update_weights(8, weights_for(listener.engine, other))
    listener.hear(lambda: True)
    assert listener.cleared and len(listener.held) == 0
    output, hit, _ = listener.ask(3, tokens)
    assert hit == 0
    assert output.logprobs == pytest.approx(plain_logprobs(other, tokens, output.tokens, 0.0), abs=1e-5)
    listener.hear(lambda: listener.holds(tokens) == 4)
    assert listener.ask(4, tokens)[1] == 64, "what the new weights computed is cached again"


def test_what_an_aborted_sequence_had_can_be_hit(listener: Listener) -> None:
    start, outputs = prompt(40), Outputs()
    _submitted(listener.engine, request(0, start, [80]))
    run_until(listener.engine, outputs, tokens=30)
    collect(outputs, listener.engine.abort([0]))
    so_far = [*start, *outputs[0, 0].tokens]
    assert len(so_far) >= 70
    listener.hear(lambda: listener.holds(so_far) >= 4)
    assert listener.ask(1, so_far, 5)[1] >= 64


def test_under_pressure_blocks_go_and_events_say_exactly_what_is_left(
    build: Build, reference: Callable[[str], PreTrainedModel]
) -> None:
    engine = build(context=64, kv=128, block_size=BLOCK)
    listener = emptied(engine, reference("qwen3"))
    sequences = [prompt(58, salt) for salt in range(5)]
    for group, tokens in enumerate(sequences):
        listener.ask(group, tokens, 2)
        listener.hear(lambda tokens=tokens: listener.holds(tokens) >= 2)
    listener.hear(lambda: bool(listener.removed))
    assert len(listener.held) * BLOCK <= 128
    assert not any(name in listener.held for name in listener.removed)
    held = [listener.holds(tokens) for tokens in sequences]
    assert held[4] >= 2 and held[0] == 0, "the least recently used went first"
    for group in (4, 0, 3):  # what one asks for may push out the others
        expected = listener.holds(sequences[group])
        assert listener.ask(5 + group, sequences[group], 2)[1] == expected * BLOCK
        listener.hear(lambda tokens=sequences[group]: listener.holds(tokens) >= 2)


# ---- the embedded engine alone -----------------------------------------------------------------------------------


def test_a_cache_that_is_switched_off_holds_and_tells_nothing(directories: dict[str, Path]) -> None:
    limits = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_tokens": 192}
    off = torch_engine(directories["qwen3"], **limits, enable_prefix_caching=False, block_size=BLOCK)
    silent = torch_engine(directories["qwen3"], **limits)
    for engine, hits in ((off, [0, 0, 0]), (silent, [0, 0, 32])):  # it stores from the first one on that would have hit
        listener = Listener(engine)
        assert [listener.ask(group, prompt(40))[1] for group in range(3)] == hits
        assert engine.cache_events() is None


def test_a_preempted_sequence_hits_what_is_left_of_it(directories: dict[str, Path]) -> None:
    """Two that grow from 30 to 60 tokens do not fit into 100: one yields at 50, three blocks, of which the other's growth takes
    one."""
    engine = torch_engine(directories["qwen3"], max_num_seqs=4, max_model_len=64, kv_cache_tokens=100, block_size=BLOCK)
    run(_submitted(engine, request(0, prompt(30), [30]), request(1, prompt(30, 1), [30])))
    assert (engine.stats().preemptions, engine.stats().prefix_hit_tokens) == (1, 32)


def test_a_prompt_is_prefilled_once_for_its_group(directories: dict[str, Path]) -> None:
    engine = torch_engine(directories["qwen3"], max_num_seqs=3, max_model_len=64, kv_cache_tokens=192)
    # The first stays until the fourth, which had to wait for a row, has borrowed the prompt from it.
    outputs = run(_submitted(engine, request(0, prompt(10), [20, 5, 5, 5], SAMPLED)))
    assert [len(outputs[0, i].tokens) for i in range(4)] == [20, 5, 5, 5]
    assert engine.stats().prompt_tokens == 10


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"kv_cache_tokens": 63}, "kv_cache_tokens=63 is below max_model_len=64"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_model_len": 1}, "max_model_len=1"),
    ],
)
def test_limits_that_cannot_work_are_refused(
    limits: dict[str, int], message: str, directories: dict[str, Path]
) -> None:
    usable = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_tokens": 64}
    with pytest.raises(ValueError, match=message):
        torch_engine(directories["qwen3"], **{**usable, **limits})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of kind chunked_attention"),
    ],
)
def test_models_that_would_be_decoded_wrongly_are_refused(changes: dict[str, object], message: str) -> None:
    model = make_model(Qwen3Config(**SIZES, **HEADS, **changes), seed=0)
    with pytest.raises(ValueError, match=message):
        TorchEngine(model, eos_token_ids=(EOS,), max_num_seqs=2, max_model_len=64, kv_cache_tokens=64)
