"""What it costs a trainer to leave its GPU and to take it again (psrl.colocate), by the way in which its memory is released, and what
it stands still for a checkpoint. One GPU.

    python benchmarks/gpu_turns.py [--size 0.6B] [--rounds 4] [--activations-gib 10]

Weights and two moments in float32 of a Qwen3-shaped model lie in memory that is released; as much as a step leaves behind is in
PyTorch's cache beside it, and given back too ("cache"). psrl's "saver" keeps its host copies from turn to turn; "copies anew" does not,
"one segment" also reserves its memory in one piece before anything is allocated from it. The first round counts apart: it makes the
copies. Each kind runs in a process of its own: the saver never gives back what it has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from gpu_weights import SIZES, published_shapes, timed
from report_machine import describe_machine
from trainer_models import GIB

from psrl.colocate.memory import HostCopies, Memory, SaverRegion
from psrl.trainer.backends.host_copy import StateCopy

COPIES = 3
"""Weights, first and second moments."""
CHECKPOINT = "checkpoint"
ANEW, ONE_SEGMENT = "saver, copies anew", "saver, one segment"
KINDS = ("host copies", ANEW, "saver", ONE_SEGMENT, CHECKPOINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--activations-gib", type=float, default=10.0)
    parser.add_argument("--kind", choices=KINDS, help="this one alone, in this process")
    args = parser.parse_args()
    if args.kind == CHECKPOINT:
        measure_checkpoint(args)
    elif args.kind is not None:
        measure_turns(args)
        os._exit(0)  # what lies in the saver's memory cannot be freed once its region is gone
    else:
        print(f"{describe_machine()}\n{args.size}; pinned host memory and the GPU: {pinned_gb_s():.1f} GB/s")
        print(
            f"{'':20}{'GiB':>7}{'segments':>10}{'first leave ms':>16}{'leave ms':>10}{'of it cache':>13}{'take ms':>9}",
            flush=True,
        )
        torch.cuda.empty_cache()
        for kind in KINDS:
            subprocess.run([sys.executable, *sys.argv, "--kind", kind], check=True)


def measure_turns(args: argparse.Namespace) -> None:
    held: list[torch.Tensor] = []
    memory: Memory = HostCopies(lambda: held) if args.kind == "host copies" else SaverRegion()
    if args.kind == ANEW:
        from torch_memory_saver import torch_memory_saver

        torch_memory_saver.retain_cpu_backup = False
    shapes = list(published_shapes(args.size).values()) * COPIES
    with memory.region():
        if args.kind == ONE_SEGMENT:
            torch.empty(sum(4 * torch.Size(shape).numel() + 2**9 for shape in shapes), dtype=torch.uint8, device="cuda")
        held += [torch.zeros(shape, device="cuda") for shape in shapes]
    segments = len(torch.cuda.memory_snapshot())
    leave, cache, take = [], [], []
    for _ in range(args.rounds + 1):
        pieces = [torch.empty(2**26, dtype=torch.uint8, device="cuda") for _ in range(int(16 * args.activations_gib))]
        del pieces
        cache.append(once_ms(torch.cuda.empty_cache))
        leave.append(cache[-1] + once_ms(memory.pause))
        take.append(once_ms(memory.resume))
    median = statistics.median
    print(
        f"{args.kind:20}{sum(t.nbytes for t in held) / GIB:7.2f}{segments:10}{leave[0]:16.0f}{median(leave[1:]):10.0f}"
        f"{median(cache[1:]):13.0f}{median(take[1:]):9.0f}",
        flush=True,
    )


def measure_checkpoint(args: argparse.Namespace) -> None:
    shapes = list(published_shapes(args.size).values()) * COPIES
    state = {str(number): torch.zeros(shape, device="cuda") for number, shape in enumerate(shapes)}
    host = StateCopy()
    took = [once_ms(lambda: host.of(state)) for _ in range(args.rounds + 1)]
    print(f"a checkpoint's copy: {took[0]:.0f} ms the first time, then {statistics.median(took[1:]):.0f}")


def once_ms(action: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


def pinned_gb_s() -> float:
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    return GIB / 1e9 / timed(lambda: host.copy_(device, non_blocking=True), device.device, rounds=5)


if __name__ == "__main__":
    main()
