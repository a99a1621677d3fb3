"""vLLM through psrl's engine against bare AsyncLLM, and what a switch of weights costs. One GPU (or a CPU, for a look).

    python benchmarks/gpu_rollout.py [--samples 256] [--new-tokens 512] [--size 0.6b] [--out FILE]

Both decode the same prompts with the same vLLM settings, one after the other in this process (each with an engine core of its own,
the other's being closed), and say what they found as soon as they know it; nothing is downloaded, weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
from transformers import Qwen3Config

from psrl.models.load import checkpoint_specs
from psrl.net.waiting import wait
from psrl.protocol.generation import GenerateRequest, SampleRequest, SamplingParams
from psrl.rollout.engines.vllm_arguments import engine_arguments
from psrl.rollout.engines.vllm_engine import VllmEngine

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
GROUP = 8
"""Samples of one prompt."""
DEADLINE_S = 300.0


def make_model(size: str, directory: Path) -> None:
    """A Qwen3-shaped directory without weights: vLLM begins with random ones, psrl sends others."""
    tiny = size == "tiny"
    Qwen3Config(
        vocab_size=512 if tiny else 151_936,
        num_key_value_heads=2 if tiny else 8,
        head_dim=32 if tiny else 128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        **SIZES[size],
    ).save_pretrained(directory)


def prompts(args: argparse.Namespace, vocab: int, turn: int) -> list[list[int]]:
    """Others each turn, so that no prefix cache has them."""
    draw = torch.Generator().manual_seed(turn + 1)
    return [torch.randint(vocab, (args.prompt_tokens,), generator=draw).tolist() for _ in range(args.samples // GROUP)]


def requests(args: argparse.Namespace, vocab: int, new_tokens: int, turn: int) -> Iterator[GenerateRequest]:
    for group, ids in enumerate(prompts(args, vocab, turn)):
        yield GenerateRequest(
            group=group,
            min_version=-1,
            incarnation=0,
            prompt_ids=tuple(ids),
            sampling=SamplingParams(ignore_eos=True),
            samples=tuple(
                SampleRequest(sample=i, max_new_tokens=new_tokens, seed=GROUP * group + i) for i in range(GROUP)
            ),
        )


def through_psrl(engine: VllmEngine, args: argparse.Namespace, vocab: int, turn: int) -> float:
    """Tokens a second, from the first request to the last token."""
    begun, tokens = time.perf_counter(), 0
    for request in requests(args, vocab, args.new_tokens, turn):
        engine.submit(request)
    while engine.has_work():
        wait([engine], DEADLINE_S)
        tokens += sum(len(chunk.token_ids) for chunk in engine.step())
    assert tokens == args.samples * args.new_tokens, tokens
    return tokens / (time.perf_counter() - begun)


def switches(engine: VllmEngine, args: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Switch weights while all samples decode: seconds in which the caller waits, and the longest gap between two steps of
    the engine around a switch, beside its usual one. Samples go on through all of them."""
    weights = [(name, 0.02 * torch.randn(shape).to(dtype)) for name, (shape, dtype) in engine.weight_specs().items()]
    for request in requests(args, vocab, 4 * args.new_tokens, turn=-1):
        engine.submit(request)
    arrivals: list[float] = []
    marks: list[int] = []
    calls: list[float] = []
    parts: list[Mapping[str, float]] = []

    def watch(steps: int) -> None:
        until = len(arrivals) + steps
        while len(arrivals) < until and engine.has_work():
            wait([engine], DEADLINE_S)
            if engine.step():
                arrivals.append(time.perf_counter())

    watch(20)
    for version in range(args.switches):
        begun = time.perf_counter()
        engine.update_weights(version, weights)
        calls.append(time.perf_counter() - begun)
        parts.append(engine.last_switch)
        marks.append(len(arrivals))
        watch(40)
    engine.abort()
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    usual = statistics.median(gaps)
    stalls = [gaps[mark - 1] - usual for mark in marks]
    return {
        "bytes": sum(tensor.nbytes for _, tensor in weights),
        "call_s": statistics.median(calls),
        "parts_s": {name: statistics.median(part[name] for part in parts) for name in parts[0]},
        "usual_step_s": usual,
        "stall_s": statistics.median(stalls),
        "stall_max_s": max(stalls),
    }


async def bare(arguments: dict[str, Any], args: argparse.Namespace, vocab: int) -> list[float]:
    """The same with vLLM's own front end."""
    from vllm import SamplingParams as VllmSampling
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    ours = ("worker_extension_cls", "disable_log_stats")
    usual = {name: value for name, value in arguments.items() if name not in ours}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**usual, disable_log_stats=True))

    async def one(number: int, ids: list[int], seed: int) -> int:
        sampling = VllmSampling(
            max_tokens=args.new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            seed=seed if args.bare_seeds else None,
            output_kind=RequestOutputKind.DELTA,
        )
        made = 0
        async for output in llm.generate({"prompt_token_ids": ids}, sampling, str(number)):
            made += len(output.outputs[0].token_ids)
        return made

    rates = []
    for turn in range(args.turns + 1):
        begun = time.perf_counter()
        work = [
            one((turn * args.samples) + GROUP * group + i, ids, GROUP * group + i)
            for group, ids in enumerate(prompts(args, vocab, turn))
            for i in range(GROUP)
        ]
        made = sum(await asyncio.wait_for(asyncio.gather(*work), DEADLINE_S))
        assert made == args.samples * args.new_tokens, made
        rates.append(made / (time.perf_counter() - begun))
    llm.shutdown()
    return rates[1:]


def say_where(args: argparse.Namespace, start_s: float) -> None:
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"vLLM {vllm.__version__}, torch {torch.__version__} on {device}, {args.size} {args.dtype}, {args.samples} samples, "
        f"{args.prompt_tokens} in, {args.new_tokens} out; engine started in {start_s:.0f} s",
        flush=True,
    )


def say_switch(stall: Mapping[str, Any]) -> None:
    print(
        f"switch    {stall['bytes'] / 1e9:.2f} GB: the engine stands still {1000 * stall['stall_s']:.1f} ms longer than "
        f"a step of {1000 * stall['usual_step_s']:.1f} ms (worst {1000 * stall['stall_max_s']:.1f}); "
        f"the call takes {1000 * stall['call_s']:.1f} ms"
    )
    print(
        "          " + ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in stall["parts_s"].items()),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=2, help="timed, after one that is not")
    parser.add_argument("--switches", type=int, default=5)
    parser.add_argument("--bare-seeds", action="store_true", help="give AsyncLLM's requests seeds too")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.samples % GROUP:
        parser.error(f"--samples must be a multiple of {GROUP}")
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make_model(args.size, directory)
        vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
        limits = {
            "max_num_seqs": args.samples,
            "max_model_len": args.prompt_tokens + 4 * args.new_tokens,
        }
        cache_tokens = args.samples * limits["max_model_len"]
        options = {"enforce_eager": args.eager, "gpu_memory_utilization": 0.8}
        begun = time.perf_counter()
        engine = VllmEngine(
            directory,
            dtype=args.dtype,
            specs=checkpoint_specs(directory, args.dtype),
            eos_token_ids=(),
            kv_cache_tokens=cache_tokens,
            options=options,
            **limits,
        )
        start_s = time.perf_counter() - begun
        say_where(args, start_s)
        ours = [through_psrl(engine, args, vocab, turn) for turn in range(args.turns + 1)][1:]
        print(f"tokens/s  psrl {statistics.median(ours):,.0f}", flush=True)
        stall = switches(engine, args, vocab)
        say_switch(stall)
        engine.close()
        del engine
        gc.collect()
        arguments = engine_arguments(directory, dtype=args.dtype, kv_cache_bytes=None, options=options, **limits)
        if not torch.cuda.is_available():
            arguments["kv_cache_memory_bytes"] = 2**30
        theirs = asyncio.run(bare(arguments, args, vocab))
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"tokens/s  bare AsyncLLM {statistics.median(theirs):,.0f}  ratio {ratio:.3f} (goal 0.95)")
    result = {
        **{name: str(value) for name, value in vars(args).items()},
        "start_s": start_s,
        "psrl_tokens_s": ours,
        "bare_tokens_s": theirs,
        "ratio": ratio,
        "switch": stall,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
