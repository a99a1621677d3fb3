"""What it costs a trainer to leave its GPU and to take it again (psrl.colocate), by the way in which its memory is released, and what
it stands still for a checkpoint. One GPU.

    python benchmarks/gpu_turns.py [--size 0.6b] [--rounds 4] [--activations-gib 10]

Weights and two moments in float32 of a Qwen3-shaped model lie in memory that is released; as much as a step leaves behind is in
PyTorch's cache beside it, and given back too ("cache"). psrl's "saver" keeps its host copies from turn to turn; "copies anew" does not,
"one segment" also reserves its memory in one piece before anything is allocated from it. The first round counts apart: it makes the copies.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from gpu_weights import SIZES, published_shapes
from report_machine import describe_machine
from trainer_models import GIB, clean

from psrl.colocate.memory import HostCopies, Memory, SaverRegion
from psrl.trainer.backends.host_copy import HostCopy

COPIES = 3
"""Weights, first and second moments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--activations-gib", type=float, default=10.0)
    args = parser.parse_args()
    print(f"{describe_machine()}\n{torch.cuda.get_device_name()}, {args.size}")
    print(
        f"{'':22}{'GiB':>7}{'segments':>10}{'first leave ms':>16}{'leave ms':>10}{'of it cache':>13}{'take ms':>9}",
        flush=True,
    )
    for name in ("host copies", "saver, copies anew", "saver", "saver, one segment"):
        held: list[torch.Tensor] = []
        memory: Memory = HostCopies(lambda held=held: held) if name == "host copies" else SaverRegion()
        if isinstance(memory, SaverRegion):
            from torch_memory_saver import torch_memory_saver

            torch_memory_saver.retain_cpu_backup = name != "saver, copies anew"
        with memory.region():
            fill(held, args.size, one_segment="one segment" in name)
        row = measure(memory, args)
        print(f"{name:22}{sum(t.nbytes for t in held) / GIB:7.2f}{row}", flush=True)
        held.clear()
        del memory
        clean()
    host, state = HostCopy(), dict(named_state(args.size))
    begun = [timed(lambda: host.of(state)) for _ in range(args.rounds + 1)]
    print(f"a checkpoint's copy: {begun[0]:.0f} ms the first time, then {statistics.median(begun[1:]):.0f}")
    print(f"a plain copy between pinned host memory and the GPU: {pinned_gb_s():.1f} GB/s")


def named_state(size: str) -> Iterator[tuple[str, torch.Tensor]]:
    held: list[torch.Tensor] = []
    fill(held, size, one_segment=False)
    return ((str(number), tensor) for number, tensor in enumerate(held))


def fill(held: list[torch.Tensor], size: str, one_segment: bool) -> None:
    shapes = list(published_shapes(size).values()) * COPIES
    if one_segment:
        torch.empty(sum(4 * torch.Size(shape).numel() + 2**9 for shape in shapes), dtype=torch.uint8, device="cuda")
    held += [torch.zeros(shape, device="cuda") for shape in shapes]


def measure(memory: Memory, args: argparse.Namespace) -> str:
    leave, cache, take = [], [], []
    segments = len(torch.cuda.memory_snapshot())
    for _ in range(args.rounds + 1):
        pieces = [torch.empty(2**26, dtype=torch.uint8, device="cuda") for _ in range(int(16 * args.activations_gib))]
        del pieces
        cache.append(timed(torch.cuda.empty_cache))
        leave.append(cache[-1] + timed(memory.pause))
        take.append(timed(memory.resume))
    median = statistics.median
    return f"{segments:10}{leave[0]:16.0f}{median(leave[1:]):10.0f}{median(cache[1:]):13.0f}{median(take[1:]):9.0f}"


def timed(action: Callable[[], None]) -> float:
    """Milliseconds."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


def pinned_gb_s() -> float:
    host, device = (
        torch.empty(GIB, dtype=torch.uint8, pin_memory=True),
        torch.empty(GIB, dtype=torch.uint8, device="cuda"),
    )
    return GIB / 1e6 / min(timed(lambda: host.copy_(device, non_blocking=True)) for _ in range(5))


if __name__ == "__main__":
    main()
