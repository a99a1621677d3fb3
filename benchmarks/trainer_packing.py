"""What rows without padding (actor.use_remove_padding) are worth in the update step, by `gpu_trainer.py --packing`.

As many real tokens in two forms: all sequences of one length, and a long tail (lognormal, its mean a quarter of the cap).
Micro-batches are planned as the trainer plans them, under one token budget: rows x longest with padding, the sum of lengths without.
Tokens/s and MFU count real tokens only.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from trainer_models import DATASHEET_FLOPS, GIB, clean, matrix_rate, shape, step_flops
from transformers import AutoModelForCausalLM

from psrl.algorithms.aggregation import Aggregation
from psrl.algorithms.policy import PolicyLoss
from psrl.algorithms.sequences import Sequences
from psrl.config.actor import ActorConfig
from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.backends.core import BackendCore
from psrl.trainer.backends.make import make_backend
from psrl.trainer.micro_batches import MICRO_BATCH_COST, plan_micro_batches

BEGUN = time.perf_counter()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEQUENCES = 16
"""Of the longest kind; the long tail has as many tokens."""
COLUMNS = "{:5} {:9} {:6} {:9} {:>7} {:>8} {:>7} {:>9} {:>7} {:>9} {:>8} {:>8} {:>8}"
HEAD = [
    "model",
    "backend",
    "lengths",
    "padding",
    "batches",
    "computed",
    "real",
    "step s",
    "real/s",
    "TFLOP/s",
    "MFU",
    "of sheet",
    "peak GiB",
]


def compare(sizes: Sequence[str], backends: Sequence[str], length: int, rows: int, steps: int, budget_s: float) -> int:
    """Print a line for each model, backend, kind of lengths and way, as it is measured."""
    reached = matrix_rate() if DEVICE == "cuda" else math.nan
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; matrix product in bfloat16 {reached / 1e12:.0f} TFLOP/s")
    print(f"token budget of a micro-batch {rows} x {length}, median of {steps} steps after 1; activations kept")
    print(COLUMNS.format(*HEAD), flush=True)
    slowest = 0.0
    for size, strategy in itertools.product(sizes, backends):
        for removed in (True, False):
            clean()
            backend = make(size, strategy, removed)
            for kind, lengths in (("equal", [length] * SEQUENCES), ("tail", long_tail(length * SEQUENCES, length))):
                begun = time.perf_counter()
                way = "removed" if removed else "kept"
                if begun + slowest > BEGUN + budget_s:
                    print(
                        f"{size:5} {strategy:9} {kind:6} {way:9} left out: {begun - BEGUN:.0f} of {budget_s:.0f} s are spent",
                        flush=True,
                    )
                    continue
                try:
                    figures = measure(backend, size, lengths, rows * length, steps, removed, reached)
                except torch.cuda.OutOfMemoryError:
                    print(f"{size:5} {strategy:9} {kind:6} {way:9} out of memory", flush=True)
                    continue
                took = time.perf_counter() - begun
                slowest = max(slowest, took)
                print(
                    COLUMNS.format(size, strategy, kind, way, *figures) + f"   (with its warm-up {took:.0f} s)",
                    flush=True,
                )
            del backend
    print(f"{time.perf_counter() - BEGUN:.0f} s in all")
    return 0


def long_tail(tokens: int, cap: int, seed: int = 0) -> list[int]:
    """Lengths with `tokens` together: lognormal (sigma 1, its mean cap / 4), cut at `cap`."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    while tokens > 1:
        drawn = int(random.lognormal(math.log(cap / 4) - 0.5, 1.0))
        lengths.append(min(max(drawn, 16), cap, tokens))
        tokens -= lengths[-1]
    return lengths


def make(size: str, strategy: str, removed: bool) -> BackendCore:
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(shape(size), dtype=torch.float32)
    actor = ActorConfig(
        strategy=strategy, mixed_precision="bfloat16" if DEVICE == "cuda" else "float32", use_remove_padding=removed
    )
    return make_backend(model, actor, temperature=1.0, device=DEVICE)


def measure(
    backend: BackendCore, size: str, lengths: list[int], budget: int, steps: int, removed: bool, reached: float
) -> list[str]:
    """The columns of a line, from the number of micro-batches on."""
    config, real = shape(size), sum(lengths)
    plan = plan_micro_batches(lengths, 1, budget, MICRO_BATCH_COST[DEVICE], padded=not removed)
    cut = [[lengths[i] for i in batch] for batch in plan.ranks[0]]
    batches = [micro_batch(part, config.vocab_size, seed) for seed, part in enumerate(cut)]
    computed = real if removed else sum(len(part) * part[0] for part in cut)
    loss = PolicyLoss(aggregation=Aggregation("token-mean", real - len(lengths)))
    times = []
    for step in range(steps + 1):
        begun = time.perf_counter()
        metrics = backend.update(batches, loss)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            if step == 0:
                torch.cuda.reset_peak_memory_stats()
        times.append(time.perf_counter() - begun)
        assert metrics["actor/skipped_steps"] == 0, "the gradient is not finite"
    step_s = statistics.median(times[1:])
    rate = sum(step_flops(config, 1, length) for length in lengths) / step_s
    peak = torch.cuda.max_memory_allocated() / GIB if DEVICE == "cuda" else math.nan
    return [
        *(str(len(batches)), str(computed), str(real), f"{step_s:.3f}", f"{real / step_s:.0f}", f"{rate / 1e12:.3g}"),
        *(f"{rate / reached:.1%}", f"{rate / DATASHEET_FLOPS:.1%}", f"{peak:.1f}"),
    ]


def micro_batch(lengths: Sequence[int], vocabulary: int, seed: int) -> MicroBatch:
    """Rows of random tokens, all trained but the first."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows = (len(lengths), max(lengths))
    real = torch.arange(rows[1], device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    mask = real.clone()
    mask[:, 0] = False
    return MicroBatch(
        input_ids=torch.randint(0, vocabulary, rows, device=DEVICE, generator=generator),
        attention_mask=real,
        loss_mask=mask,
        advantages=torch.randn(rows, device=DEVICE, generator=generator) * mask,
        rollout_log_probs=torch.full(rows, -12.0, device=DEVICE),
        sequences=Sequences.of_rows(mask),
    )
