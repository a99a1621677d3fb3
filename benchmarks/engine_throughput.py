"""Decode throughput of the embedded engine against its limit: a bare loop of the same model, measured in the same run.

    python benchmarks/engine_throughput.py [--threads 2] [--batch 64 128] [--tokens 192] [--vocab 512] [--repeats 3]

The bare loop is transformers' own forward with a DynamicCache over a fixed batch: all rows start and end together, it samples
with torch.multinomial (or takes the argmax) and keeps no log-prob, stop condition or request. The engine does all of that.
Loop and engine alternate and the best of the repeats counts, since other processes may share the cores. `prefill` is in both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from psrl.protocol.generation import GenerateRequest, SampleRequest, SamplingParams
from psrl.rollout.engines.torch_engine import TorchEngine

SAMPLES_PER_GROUP = 8
CLOCK = time.perf_counter


def tiny_qwen3(vocab_size: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def bare_loop(model: PreTrainedModel, prompts: torch.Tensor, tokens: int, greedy: bool) -> float:
    """Tokens per second of a fixed batch."""
    started = CLOCK()
    cache = DynamicCache()
    ids = prompts
    for _ in range(tokens):
        logits = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(torch.softmax(logits, -1), 1)
    return len(prompts) * tokens / (CLOCK() - started)


def requests(prompts: torch.Tensor, budgets: list[int], greedy: bool) -> list[GenerateRequest]:
    sampling = SamplingParams(temperature=0.0 if greedy else 1.0, ignore_eos=True)
    result = []
    for group, start in enumerate(range(0, len(prompts), SAMPLES_PER_GROUP)):
        samples = tuple(
            SampleRequest(sample=i, max_new_tokens=budget, seed=start + i)
            for i, budget in enumerate(budgets[start : start + SAMPLES_PER_GROUP])
        )
        prompt = tuple(prompts[start].tolist())
        result.append(
            GenerateRequest(
                group=group, min_version=-1, incarnation=0, prompt_ids=prompt, sampling=sampling, samples=samples
            )
        )
    return result


def engine_run(engine: TorchEngine, work: list[GenerateRequest]) -> float:
    """Tokens per second until the last sample is done."""
    started = CLOCK()
    for request in work:
        engine.submit(request)
    total = 0
    while engine.has_work():
        total += sum(len(chunk.token_ids) for chunk in engine.step())
    return total / (CLOCK() - started)


def best_of(repeats: int, *runs: Callable[[], float]) -> list[float]:
    """Best figure of each run, the runs taking turns."""
    figures = [[run() for run in runs] for _ in range(repeats)]
    return [max(column) for column in zip(*figures, strict=True)]


def main() -> None:
    global CLOCK
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-clock", action="store_true", help="count CPU time: for one thread on a machine that others use")
    args = parser.parse_args()
    if args.cpu_clock:
        CLOCK = time.process_time
    torch.set_num_threads(args.threads)
    model = tiny_qwen3(args.vocab)
    print(f"Qwen3 128x4, vocabulary {args.vocab}, prompt {args.prompt}, {args.tokens} tokens, {args.threads} threads")
    print(f"{'batch':>6} {'sampling':>9} {'bare tok/s':>11} {'engine tok/s':>13} {'ratio':>6} {'refilled tok/s':>15} {'ratio':>6}")
    for batch in args.batch:
        engine = TorchEngine(
            model,
            eos_token_ids=(),
            max_num_seqs=batch,
            max_model_len=args.prompt + args.tokens,
            kv_cache_tokens=batch * (args.prompt + args.tokens),
        )
        prompts = torch.randint(args.vocab, (batch, args.prompt))
        many = torch.randint(args.vocab, (3 * batch, args.prompt))
        lengths = torch.randint(args.tokens // 4, args.tokens + 1, (3 * batch,)).tolist()
        for greedy in (False, True):
            fixed = requests(prompts, [args.tokens] * batch, greedy)
            mixed = requests(many, lengths, greedy)
            bare, full, refilled = best_of(
                args.repeats,
                lambda g=greedy, p=prompts: bare_loop(model, p, args.tokens, g),
                lambda e=engine, w=fixed: engine_run(e, w),
                lambda e=engine, w=mixed: engine_run(e, w),
            )
            name = "greedy" if greedy else "sampled"
            print(
                f"{batch:>6} {name:>9} {bare:>11.0f} {full:>13.0f} {full / bare:>6.2f} {refilled:>15.0f} "
                f"{refilled / bare:>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
