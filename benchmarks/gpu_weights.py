"""Weight pulls between real processes on GPUs, beside the copies that the hardware does: `python benchmarks/gpu_weights.py`.

One process for each trainer rank on GPU 0, one reader on GPU 0, then one on GPU 1 if there is one. Weights are Qwen3-shaped
bf16; the reader is a `WeightReceiver` with the fused tensors of an engine. Medians over the rounds, GB = 10^9 bytes:

    raw    bytes over the time in which they move
    pull   ... until they are there, asked for and checked (header, checksums): decoding goes on meanwhile
    end    ... until they are in the engine's own fused tensors, the switch included
    copy   the same bytes by a plain copy measured before it in the same process: within the GPU, from the other GPU, or for
           shm out of registered host memory

On one GPU the three passes (read, check, switch) run at the same memory's speed, so `end` cannot reach half of `copy`.
`--device cpu --sizes tiny --routes shm nixl` runs the same on a machine without GPUs.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing as mp
import statistics
import tempfile
import time
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from psrl.rundir.keys import create_keys
from psrl.rundir.layout import RunDir
from psrl.trainer.backends.base import WeightShard
from psrl.weights.channel.nixl_publisher import NixlPublisher
from psrl.weights.memory import SharedMemory
from psrl.weights.receiver import PullFailed, WeightReceiver

LIMIT_S = 60.0
SIZES = {  # hidden, layers, heads, key-value heads, head size, feed-forward, vocabulary
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936),
    "4B": (2560, 36, 32, 8, 128, 9728, 151936),
    "tiny": (256, 4, 4, 2, 64, 768, 4096),
}
COLUMNS = ("copy", "raw", "raw/copy", "pull", "pull/copy", "end", "end/copy", "pull_ms", "switch_ms", "publish_ms")


def published_shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names of a tied Qwen3."""
    hidden, layers, heads, kv_heads, head_dim, inner, vocabulary = SIZES[size]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        shapes |= {
            f"{attention}q_proj.weight": (heads * head_dim, hidden),
            f"{attention}k_proj.weight": (kv_heads * head_dim, hidden),
            f"{attention}v_proj.weight": (kv_heads * head_dim, hidden),
            f"{attention}o_proj.weight": (hidden, heads * head_dim),
            f"{attention}q_norm.weight": (head_dim,),
            f"{attention}k_norm.weight": (head_dim,),
            f"{mlp}gate_proj.weight": (inner, hidden),
            f"{mlp}up_proj.weight": (inner, hidden),
            f"{mlp}down_proj.weight": (hidden, inner),
            f"model.layers.{layer}.input_layernorm.weight": (hidden,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,)}


def engine_shapes(size: str) -> dict[str, tuple[int, ...]]:
    """The same model as an engine holds it."""
    shapes = published_shapes(size)
    fused: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            if parts[0] in name:
                rows = sum(shapes[name.replace(parts[0], part)][0] for part in parts)
                fused[name.replace(parts[0], whole)] = (rows, *shape[1:])
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            fused[name] = shape
    return fused


def value(index: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Numbers that are the same on every device, and differ from row to row and from tensor to tensor."""
    rows = torch.arange(shape[0], device=device).add(17 * index).remainder(251).bfloat16()
    return rows.view(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()


def publish(rank: int, num_ranks: int, paths: dict[str, str], device: str, ready: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    publishers, publish_s = [], {}
    for size, path in paths.items():
        shards = []
        for index, (name, shape) in enumerate(published_shapes(size).items()):
            part = -(-shape[0] // num_ranks)
            start, stop_row = min(shape[0], rank * part), min(shape[0], (rank + 1) * part)
            shards.append(WeightShard(name, shape, start, value(index, shape, place)[start:stop_row].clone()))
        publisher = NixlPublisher(RunDir(Path(path)), rank, num_ranks, torch.bfloat16)
        publisher.serve()
        seconds = [publisher.publish(version, 0, shards).pack_s for version in range(4)]
        publish_s[size] = min(seconds)
        publishers.append(publisher)
    ready.put((rank, publish_s))
    stop.wait(20 * LIMIT_S)
    for publisher in publishers:
        publisher.close()


def timed(action: Any, device: torch.device, rounds: int) -> float:
    """Median seconds of an action, the device's work included."""
    seconds = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def plain_copy(route: str, nbytes: int, trainer: torch.device, reader: torch.device, rounds: int) -> float:
    """GB/s of the copy that the route is held against."""
    target = torch.zeros(nbytes, dtype=torch.uint8, device=reader)
    if route == "vram":
        source = torch.ones(nbytes, dtype=torch.uint8, device=trainer)
        return nbytes / timed(lambda: target.copy_(source, non_blocking=True), reader, rounds) / 1e9
    nbytes = min(nbytes, 2 * 10**9)  # as fast as all of it, and sooner allocated
    shared = SharedMemory(nbytes, registered=reader.type == "cuda")
    try:
        copy_s = timed(lambda: target[:nbytes].copy_(shared.buffer, non_blocking=True), reader, rounds)
    finally:
        shared.close()
    return nbytes / copy_s / 1e9


def pulled(receiver: WeightReceiver, version: int) -> Any:
    receiver.start(version, 0, LIMIT_S)
    while (outcome := receiver.poll()) is None:
        time.sleep(0.00005)
    if isinstance(outcome, PullFailed):
        raise RuntimeError(outcome.cause)
    return outcome


def read(
    paths: dict[str, str], routes: list[str], trainer: str, reader: str, rounds: int, turn: Any, results: Any
) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device(reader)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    turn.wait(4 * LIMIT_S)
    for size, path in paths.items():
        shapes = engine_shapes(size)
        for route in routes:
            row: dict[str, Any] = {"size": size, "reader": reader, "route": route}
            try:
                engine = {
                    name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()
                }
                nbytes = sum(tensor.nbytes for tensor in engine.values())
                row |= measure(path, route, engine, device, rounds)
                row["copy"] = plain_copy(route, nbytes, torch.device(trainer), device, rounds)
                row |= {f"{name}/copy": row[name] / row["copy"] for name in ("raw", "pull", "end")}
            except Exception as error:  # the other rows shall be had
                row["error"] = f"{type(error).__name__}: {error}"
            results.put(row)
    results.put(None)


def measure(
    path: str, route: str, engine: dict[str, torch.Tensor], device: torch.device, rounds: int
) -> dict[str, Any]:
    nbytes = sum(tensor.nbytes for tensor in engine.values())
    receiver = WeightReceiver(Path(path), engine, device=device, route=route, fused=True)
    begun = time.perf_counter()
    first = pulled(receiver, 3)
    first_s = time.perf_counter() - begun
    receiver.switch()
    check(engine, device)
    found = []
    for _ in range(rounds):
        outcome = pulled(receiver, 3)
        found.append((outcome.transfer_s, outcome.pull_s, receiver.switch()))
    transfer_s, pull_s, switch_s = (statistics.median(column) for column in zip(*found, strict=True))
    receiver.close()
    return {
        "transport": first.transport, "GB": nbytes / 1e9, "raw": nbytes / transfer_s / 1e9, "pull": nbytes / pull_s / 1e9,
        "end": nbytes / (pull_s + switch_s) / 1e9, "pull_ms": 1e3 * pull_s, "switch_ms": 1e3 * switch_s,
        "first_ms": 1e3 * first_s,
    }  # fmt: skip


def check(engine: dict[str, torch.Tensor], device: torch.device) -> None:
    """The last layer's fused tensors and the norm hold what was published."""
    given = {int(name.split(".")[2]) for name in engine if ".layers." in name}
    size = next(size for size in SIZES if engine_shapes(size) == {name: tuple(t.shape) for name, t in engine.items()})
    shapes = published_shapes(size)
    values = {
        name: value(index, shape, device)
        for index, (name, shape) in enumerate(shapes.items())
        if f".{max(given)}." in name or name == "model.norm.weight"
    }
    layer = f"model.layers.{max(given)}."
    qkv = torch.cat([values[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([values[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    for name, wanted in (
        (f"{layer}self_attn.qkv_proj.weight", qkv),
        (f"{layer}mlp.gate_up_proj.weight", gate_up),
        (f"{layer}mlp.down_proj.weight", values[f"{layer}mlp.down_proj.weight"]),
        ("model.norm.weight", values["model.norm.weight"]),
    ):
        if not torch.equal(engine[name], wanted):
            raise RuntimeError(f"{name} is not what was published")


def heard(queue: Any, sender: Any) -> Any:
    """The next word of a process; SystemExit as soon as it is dead, or silent for too long."""
    end = time.monotonic() + 2 * LIMIT_S
    while time.monotonic() < end:
        try:
            return queue.get(timeout=0.5)
        except Empty:
            if not sender.is_alive() and queue.empty():
                raise SystemExit(f"{sender.name} ended with {sender.exitcode}") from None
    raise SystemExit(f"{sender.name} said nothing for {2 * LIMIT_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sizes", nargs="+", default=["0.6B", "4B"], choices=list(SIZES))
    parser.add_argument("--routes", nargs="+", default=["vram", "shm"])
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks, all on GPU 0")
    parser.add_argument("--reader-gpus", type=int, nargs="+", default=[0, 1], help="those that there are")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    trainer = "cpu" if args.device == "cpu" else "cuda:0"
    gpus = torch.cuda.device_count() if args.device == "cuda" else 1
    readers = ["cpu"] if args.device == "cpu" else [f"cuda:{index}" for index in args.reader_gpus if index < gpus]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        paths = {size: str(Path(root) / size) for size in args.sizes}
        for path in paths.values():
            RunDir(Path(path)).create()
            create_keys(RunDir(Path(path)))
        ready, results, stop = context.Queue(), context.Queue(), context.Event()
        turns = [context.Event() for _ in readers]
        publishers = [
            context.Process(target=publish, args=(rank, args.ranks, paths, trainer, ready, stop), daemon=True)
            for rank in range(args.ranks)
        ]
        reading = [
            context.Process(
                target=read, args=(paths, args.routes, trainer, reader, args.rounds, turn, results), daemon=True
            )
            for reader, turn in zip(readers, turns, strict=True)
        ]
        for process in (*publishers, *reading):
            process.start()
        told = dict(heard(ready, process) for process in publishers)
        print("| size | trainer -> reader | transport | " + " | ".join(COLUMNS) + " |")
        print("|---" * (3 + len(COLUMNS)) + "|")
        for process, turn in zip(reading, turns, strict=True):
            turn.set()
            while (row := heard(results, process)) is not None:
                row["publish_ms"] = 1e3 * max(seconds[row["size"]] for seconds in told.values())
                rows.append(row)
                shown = [f"{row[name]:.3g}" if name in row else "" for name in COLUMNS]
                what = row.get("error") or row["transport"]
                print(
                    f"| {row['size']} | {trainer} -> {row['reader']} | {what} | " + " | ".join(shown) + " |", flush=True
                )
            process.join(LIMIT_S)
        stop.set()
        for process in publishers:
            process.join(LIMIT_S)
    print("GB/s; ms. first pull (meeting, memory):", {f"{r['size']} {r['reader']} {r['route']}": round(r["first_ms"]) for r in rows if "first_ms" in r})  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
