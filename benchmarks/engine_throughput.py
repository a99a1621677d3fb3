"""Decode throughput of the embedded engine against its limit: a bare loop of the same model, measured in the same run.

    python benchmarks/engine_throughput.py [--threads 2] [--batch 64 128] [--tokens 192] [--vocab 512] [--repeats 3]

The bare loop is transformers' own forward with a DynamicCache over a fixed batch: all rows start and end together, it
samples with torch.multinomial (or takes the argmax) and keeps no log-prob, stop condition or request. The engine does
all of that, once for the same fixed batch and once for three times as many samples of 1/4 to 1/1 of the length, which
join as others leave ("refilled"; its last rows run in a shrinking batch). Prefill counts in each figure.
The three take turns and the best of the repeats counts, since other processes may share the cores.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from psrl.protocol.generation import GenerateRequest, SampleRequest, SamplingParams
from psrl.rollout.engines.torch_engine import TorchEngine

SAMPLES_PER_GROUP = 8
Clock = Callable[[], float]


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
def bare_loop(model: PreTrainedModel, prompts: torch.Tensor, tokens: int, greedy: bool, clock: Clock) -> float:
    """Tokens per second of a fixed batch."""
    started = clock()
    cache = DynamicCache()
    cache_key = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = prompts
    for _ in range(tokens):
        logits = model(ids, **{cache_key: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(torch.softmax(logits, -1), 1)
    return len(prompts) * tokens / (clock() - started)


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


def engine_run(engine: TorchEngine, work: list[GenerateRequest], clock: Clock) -> float:
    """Tokens per second until the last sample is done."""
    started = clock()
    for request in work:
        engine.submit(request)
    total = 0
    while engine.has_work():
        total += sum(len(chunk.token_ids) for chunk in engine.step())
    return total / (clock() - started)


def best_of(repeats: int, *runs: Callable[[], float]) -> list[float]:
    """Best figure of each run, the runs taking turns."""
    figures = [[run() for run in runs] for _ in range(repeats)]
    return [max(column) for column in zip(*figures, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-clock", action="store_true", help="CPU time: one thread, shared machine")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_clock else time.perf_counter
    torch.set_num_threads(args.threads)
    model = tiny_qwen3(args.vocab)
    print(f"Qwen3 128x4, vocabulary {args.vocab}, prompt {args.prompt}, {args.tokens} tokens, {args.threads} threads")
    columns = ("batch", "sampling", "bare tok/s", "engine tok/s", "ratio", "refilled tok/s", "ratio")
    print("{:>6} {:>9} {:>11} {:>13} {:>6} {:>15} {:>6}".format(*columns))
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
                partial(bare_loop, model, prompts, args.tokens, greedy, clock),
                partial(engine_run, engine, fixed, clock),
                partial(engine_run, engine, mixed, clock),
            )
            name = "greedy" if greedy else "sampled"
            print(
                f"{batch:>6} {name:>9} {bare:>11.0f} {full:>13.0f} {full / bare:>6.2f} {refilled:>15.0f} "
                f"{refilled / bare:>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
