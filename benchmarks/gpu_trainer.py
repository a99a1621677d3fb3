"""The update step on a GPU: model FLOPs utilisation and peak memory of each backend, and what chunked log-probs save.

    python benchmarks/gpu_trainer.py [--sizes 0.6b 1.7b] [--length 4096] [--rows 4] [--profile]
    python benchmarks/gpu_trainer.py --packing [--sizes ...] [--length 4096]      # rows with padding against none: trainer_packing.py

Qwen3-shaped models with random weights, rows of `--length` tokens without padding, bfloat16 compute over float32 weights; with
activations recomputed, kept, and kept without torch.compile. MFU counts the forward and backward pass of the model once (recomputation is overhead), causal
attention as half of the square, over the matrix rate that the same GPU reaches in the same run (and over the datasheet's).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
from trainer_models import DATASHEET_FLOPS, GIB, SIZES, VOCABULARY, clean, matrix_rate, shape, step_flops
from trainer_packing import compare
from transformers import AutoModelForCausalLM

from psrl.algorithms.aggregation import Aggregation
from psrl.algorithms.policy import PolicyLoss
from psrl.algorithms.sequences import Sequences
from psrl.algorithms.token_log_probs import token_log_probs
from psrl.config.actor import ActorConfig
from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.backends.make import make_backend

ACTIVATIONS: dict[str, dict[str, bool]] = {
    "recomputed": {"gradient_checkpointing": True},
    "kept": {},
    "kept, eager": {"use_torch_compile": False},
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6b", "1.7b"])
    parser.add_argument("--backends", nargs="+", default=["fsdp2", "megatron"])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="one more step each: where the time goes, by kernel")
    parser.add_argument("--packing", action="store_true", help="compare rows with padding and without instead")
    parser.add_argument(
        "--budget-s", type=float, default=120.0, help="--packing: seconds after which nothing more is begun"
    )
    args = parser.parse_args()
    if args.packing:
        return compare(args.sizes, args.backends, args.length, args.rows, args.steps, args.budget_s)
    reached = matrix_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; matrix product in bfloat16 {reached / 1e12:.0f} TFLOP/s"
    )
    print(
        f"{args.micro_batches} micro-batches of {args.rows} x {args.length} tokens a step, median of {args.steps} steps after 1\n"
    )
    head = (
        "model",
        "backend",
        "activations",
        "step s",
        "tokens/s",
        "TFLOP/s",
        "MFU reached",
        "MFU datasheet",
        "peak GiB",
    )
    print("{:6} {:9} {:12} {:>8} {:>9} {:>8} {:>12} {:>14} {:>9}".format(*head))
    for size in args.sizes:
        for backend in args.backends:
            if backend == "megatron" and importlib.util.find_spec("megatron") is None:
                print(f"{size:6} {backend:9} megatron-core is not installed")
                continue
            for activations in ACTIVATIONS:
                try:
                    row = measure(size, backend, activations, args)
                except torch.cuda.OutOfMemoryError:
                    print(f"{size:6} {backend:9} {activations:12} out of memory")
                    continue
                step_s, flops, peak, profile = row
                tokens = args.rows * args.length * args.micro_batches
                print(
                    f"{size:6} {backend:9} {activations:12} {step_s:8.3f} {tokens / step_s:9.0f} {flops / step_s / 1e12:8.0f} "
                    f"{flops / step_s / reached:12.1%} {flops / step_s / DATASHEET_FLOPS:14.1%} {peak / GIB:9.1f}",
                    flush=True,
                )
                if args.profile:
                    print(profile, flush=True)
                clean()
    print()
    log_prob_memory(args.length)
    return 0


def measure(size: str, backend_name: str, activations: str, args: argparse.Namespace) -> tuple[float, float, int, str]:
    """(median seconds of a step, floating-point operations of a step, peak bytes, time by kernel if asked for)."""
    clean()
    config = shape(size)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    actor = ActorConfig(strategy=backend_name, mixed_precision="bfloat16", **ACTIVATIONS[activations])
    backend = make_backend(model, actor, temperature=1.0, device="cuda")
    del model
    rows, length = args.rows, args.length
    batches = [micro_batch(rows, length, seed) for seed in range(args.micro_batches)]
    tokens = rows * (length - 1) * args.micro_batches
    loss = PolicyLoss(aggregation=Aggregation("token-mean", tokens))
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.steps + 1):
        begun = time.perf_counter()
        metrics = backend.update(batches, loss)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
        assert metrics["actor/skipped_steps"] == 0, "the gradient is not finite"
    return (
        statistics.median(times[1:]),
        step_flops(config, rows, length) * args.micro_batches,
        torch.cuda.max_memory_allocated(),
        by_kernel(lambda: backend.update(batches, loss)) if args.profile else "",
    )


def by_kernel(step: Callable[[], object]) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)[:20]
    return "\n".join(f"    {row.self_device_time_total / 1e3:9.1f} ms {row.count:6} x {row.key[:110]}" for row in rows)


def micro_batch(rows: int, length: int, seed: int) -> MicroBatch:
    generator = torch.Generator("cuda").manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), device="cuda", generator=generator)
    full = torch.ones(rows, length, dtype=torch.bool, device="cuda")
    mask = full.clone()
    mask[:, 0] = False
    advantages = torch.randn(rows, length, device="cuda", generator=generator)
    return MicroBatch(
        input_ids=ids,
        attention_mask=full,
        loss_mask=mask,
        advantages=advantages,
        rollout_log_probs=torch.full((rows, length), -12.0, device="cuda"),
        sequences=Sequences.of_rows(mask),
    )


def log_prob_memory(length: int) -> None:
    """Peak memory of log-probs with their backward pass from bfloat16 logits of one row."""

    def plain(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return logits.float().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)

    def fused(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return token_log_probs(logits, tokens, fused=True)

    print(
        f"log-probs of {length} tokens over {VOCABULARY} logits, forward and backward, beside the logits and their gradient"
    )
    peaks = {
        name: extra_peak(way, length)
        for name, way in (("plain", plain), ("chunked", token_log_probs), ("fused", fused))
    }
    for name, (peak, seconds) in peaks.items():
        print(f"  {name:8} {peak / GIB:6.2f} GiB {seconds * 1e3:7.1f} ms")


def extra_peak(way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], length: int) -> tuple[int, float]:
    clean()
    logits = torch.randn(length, VOCABULARY, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(0, VOCABULARY, (length,), device="cuda")
    times = []
    for _ in range(3):
        logits.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        way(logits, tokens).sum().backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return torch.cuda.max_memory_allocated() - 2 * logits.numel() * logits.element_size(), min(times)


if __name__ == "__main__":
    raise SystemExit(main())
