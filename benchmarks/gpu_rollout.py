"""vLLM through psrl's engine against bare AsyncLLM, and what pulls and switches of weights cost it. One GPU (or a CPU, for a look).

    python benchmarks/gpu_rollout.py [--samples 256] [--new-tokens 512] [--size 0.6b] [--routes vram shm] [--without-bare] [--out FILE]

All decode the same prompts with the same vLLM settings, one after the other in this process (each with an engine core of its own,
the other's being closed), and say what they found as soon as they know it; nothing is downloaded, weights are random. psrl is
measured with a seed for each sample and without (rollout.seed_samples). See `rollout_pulls.py` for the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import rollout_pulls
import torch
from trainer_models import SIZES, shape

from psrl.models.load import checkpoint_specs
from psrl.net.waiting import wait
from psrl.protocol.generation import GenerateRequest, SampleRequest, SamplingParams
from psrl.rollout.engines.vllm_arguments import engine_arguments
from psrl.rollout.engines.vllm_engine import VllmEngine

GROUP = 8
"""Samples of one prompt."""
DEADLINE_S = 300.0


def make_model(size: str, directory: Path) -> None:
    """A Qwen3-shaped directory without weights: vLLM begins with random ones, psrl sends others."""
    config = shape(size)
    config.update({"architectures": ["Qwen3ForCausalLM"]})
    config.save_pretrained(directory)


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


def pulls(engine: VllmEngine, args: argparse.Namespace, vocab: int) -> list[rollout_pulls.Row]:
    """Weights by each route, from a publisher on the same device."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"

    def busy() -> None:
        for request in requests(args, vocab, 4 * args.new_tokens, turn=-1):
            engine.submit(request)

    rows = []
    with rollout_pulls.publishing(dict(engine.weight_specs()), device) as run_dir:
        for route in args.routes:
            row = rollout_pulls.measure(engine, run_dir, route, busy, args.new_tokens // 16, args.switches)
            row["copy_ms"] = rollout_pulls.copy_ms(round(1e9 * row["GB"]), device)
            rollout_pulls.say(row)
            rows.append(row)
    return rows


async def bare(arguments: dict[str, Any], turns: Sequence[Sequence[Sequence[int]]], new_tokens: int) -> list[float]:
    """Tokens a second of each turn but the first, with vLLM's own front end; a turn is its samples' prompts, all there at once."""
    from vllm import SamplingParams as VllmSampling
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    ours = ("worker_extension_cls", "disable_log_stats")
    usual = {name: value for name, value in arguments.items() if name not in ours}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**usual, disable_log_stats=True))

    async def one(request: str, ids: Sequence[int]) -> int:
        sampling = VllmSampling(
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        made = 0
        async for output in llm.generate({"prompt_token_ids": list(ids)}, sampling, request):
            made += len(output.outputs[0].token_ids)
        return made

    rates = []
    for number, samples in enumerate(turns):
        begun = time.perf_counter()
        work = [one(f"{number}-{i}", ids) for i, ids in enumerate(samples)]
        made = sum(await asyncio.wait_for(asyncio.gather(*work), DEADLINE_S))
        assert made == len(samples) * new_tokens, made
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=2, help="timed, after one that is not")
    parser.add_argument("--switches", type=int, default=5)
    parser.add_argument(
        "--routes", nargs="+", default=["vram", "shm"], help="ways of the weights, see psrl.weights.route"
    )
    parser.add_argument("--eager", action="store_true")
    parser.add_argument(
        "--without-bare", action="store_true", help="no second engine: for what pulls cost a larger model"
    )
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
        options = {"enforce_eager": args.eager, "gpu_memory_utilization": 0.7}
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
        engine.seed_samples = True
        rates = {"seeded": [through_psrl(engine, args, vocab, turn) for turn in range(args.turns + 1)][1:]}
        print(f"tokens/s  psrl, a seed for each sample {statistics.median(rates['seeded']):,.0f}", flush=True)
        engine.seed_samples = False
        rates["unseeded"] = [through_psrl(engine, args, vocab, 100 + turn) for turn in range(args.turns)]
        print(f"tokens/s  psrl without seeds {statistics.median(rates['unseeded']):,.0f}", flush=True)
        rows = pulls(engine, args, vocab)
        engine.close()
        if args.without_bare:
            save(args, start_s, rates, rows)
            return
        del engine
        gc.collect()
        arguments = engine_arguments(directory, dtype=args.dtype, kv_cache_bytes=None, options=options, **limits)
        if not torch.cuda.is_available():
            arguments["kv_cache_memory_bytes"] = 2**30
        turns = [[ids for ids in prompts(args, vocab, turn) for _ in range(GROUP)] for turn in range(args.turns + 1)]
        rates["bare"] = asyncio.run(bare(arguments, turns, args.new_tokens))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    print(
        f"tokens/s  bare AsyncLLM {medians['bare']:,.0f}; ratio {medians['seeded'] / medians['bare']:.3f} (goal 0.95), "
        f"without seeds {medians['unseeded'] / medians['bare']:.3f}"
    )
    save(args, start_s, rates, rows)


def save(
    args: argparse.Namespace, start_s: float, rates: dict[str, list[float]], rows: list[rollout_pulls.Row]
) -> None:
    said = {name: str(value) for name, value in vars(args).items()}
    if args.out:
        args.out.write_text(json.dumps({**said, "start_s": start_s, "tokens_s": rates, "weights": rows}, indent=1))


if __name__ == "__main__":
    main()
