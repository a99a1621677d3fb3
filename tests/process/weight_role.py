"""A publisher or a reader of weights as a process of its own; commands come as JSON lines, each is answered by one.

CHANNEL: filesystem, or a route of the memory channel: auto, shm, nixl.

`main("publisher", CHANNEL, RUN_DIR, RANK, NUM_RANKS, MIB)` or `main("reader", CHANNEL, RUN_DIR, MIB)`
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import psutil
import torch

from psrl.protocol.weights import ShardLayout
from psrl.rundir.layout import RunDir
from psrl.trainer.backends.base import WeightShard
from psrl.weights import broadcast
from psrl.weights.channel import host_server, nixl_publisher
from psrl.weights.channel.base import PullError, StagedWeights
from psrl.weights.channel.filesystem import FilesystemPublisher, FilesystemPuller
from psrl.weights.channel.nixl_publisher import NixlPublisher
from psrl.weights.channel.nixl_puller import NixlPuller

STATUS_DEADLINE_S = 30.0
WORKING_SERVER = host_server.MODULE
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]


def specs(mib: int) -> Specs:
    """Odd shapes on purpose: rows that no rank count divides, fewer rows than ranks, no dimension, an integer."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (mib * 2048, 256), "norm.weight": (37,), "scale": (), "gate.weight": (1, 33),
        "q.weight": (101, 7, 3),
    }  # fmt: skip
    return {name: (shape, torch.bfloat16) for name, shape in shapes.items()} | {"steps": ((5,), torch.int64)}


def whole(mib: int, version: int) -> dict[str, torch.Tensor]:
    """The trainer's float32 weights of a version: the same in every process."""
    generator = torch.Generator().manual_seed(1000 + version)
    return {
        name: torch.randn(shape, generator=generator)
        if dtype.is_floating_point
        else torch.randint(0, 1 << 40, shape, generator=generator)
        for name, (shape, dtype) in specs(mib).items()
    }


def shards(mib: int, version: int, rank: int, num_ranks: int) -> list[WeightShard]:
    """This rank's rows, split as FSDP2 does: equal chunks, the last ones shorter or empty."""
    out = []
    for name, tensor in whole(mib, version).items():
        rows = tensor.shape[0] if tensor.dim() else 1
        chunk = -(-rows // num_ranks)
        start = min(rows, rank * chunk)
        if tensor.dim() == 0:
            if rank == 0:
                out.append(WeightShard(name, (), 0, tensor))
            continue
        out.append(WeightShard(name, tuple(tensor.shape), start, tensor[start : min(rows, start + chunk)]))
    return out


def differing(staged: StagedWeights, mib: int, version: int) -> list[str]:
    """Names of tensors that are not bit-equal to the published ones after the cast."""
    wanted = {name: tensor.to(specs(mib)[name][1]) for name, tensor in whole(mib, version).items()}
    got = {name: tensor.clone() for name, tensor in staged.tensors()}
    return sorted(wanted.keys() ^ got.keys()) + [
        name for name, tensor in wanted.items() if name in got and not torch.equal(tensor, got[name])
    ]


def make_publisher(channel: str, run_dir: RunDir, rank: int, num_ranks: int) -> NixlPublisher | FilesystemPublisher:
    if channel != "filesystem":
        return NixlPublisher(run_dir, rank, num_ranks, torch.bfloat16, reader_grace_s=0.3)
    return FilesystemPublisher(run_dir, rank, num_ranks, torch.bfloat16)


def make_puller(channel: str, run_dir: RunDir, expected: Specs, fanout: int = 0) -> NixlPuller | FilesystemPuller:
    if channel != "filesystem":
        return NixlPuller(run_dir, expected, route=channel, window_bytes=2**20, fanout=fanout)
    return FilesystemPuller(run_dir, expected)


def die_half_way(given: list[WeightShard], layout: ShardLayout, payload: torch.Tensor) -> NoReturn:
    """In place of `pack`: a trainer that is killed while it writes."""
    payload[: layout.nbytes // 2] = 0xA5
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def kill_for_good(pid: int) -> None:
    """Somebody else's child; what it held can be read until it has really ended, which takes a busy machine a while."""
    os.kill(pid, signal.SIGKILL)
    until_status(pid, psutil.STATUS_ZOMBIE)


def stop_for_good(pid: int) -> None:
    """It goes on until it gets a core and with it the signal. Itself it cannot see stopped."""
    os.kill(pid, signal.SIGSTOP)
    if pid != os.getpid():
        until_status(pid, psutil.STATUS_STOPPED)


def until_status(pid: int, status: str) -> None:
    """Wait for psutil's `status`; a process that is gone is as good as a zombie."""
    end = time.monotonic() + STATUS_DEADLINE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() not in (status, psutil.STATUS_ZOMBIE):
            if time.monotonic() > end:
                raise TimeoutError(f"process {pid} is not {status} within {STATUS_DEADLINE_S:g} s")
            time.sleep(0.001)


def publisher_main(channel: str, run_dir: str, rank: str, num_ranks: str, mib: str) -> None:
    publisher = make_publisher(channel, RunDir(Path(run_dir)), int(rank), int(num_ranks))
    publisher.serve()
    answer({"ready": True, "transport": publisher.transport})
    for command in map(json.loads, sys.stdin):
        match command:
            case {"publish": [version, incarnation]}:
                done = publisher.publish(version, incarnation, shards(int(mib), version, int(rank), int(num_ranks)))
                answer({"nbytes": done.nbytes, "revoked": len(done.revoked)})
            case {"idle": seconds}:
                cpu, wall = time.process_time(), time.monotonic()
                time.sleep(seconds)
                answer({"cpu": (time.process_time() - cpu) / (time.monotonic() - wall)})
            case {"readers": _}:
                answer({"peak": publisher.peak_readers, "now": publisher._table.num_readers()})
            case {"server": _}:
                answer({"pid": publisher.server_pid})
            case {"break_server": broken}:
                host_server.MODULE = "psrl.weights.nowhere" if broken else WORKING_SERVER
                answer({})
            case {"scribble": slot}:
                publisher._home.payload(slot)[4096] += 1
                answer({})
            case {"die_writing": [version, incarnation]}:
                nixl_publisher.pack = die_half_way
                publisher.publish(version, incarnation, shards(int(mib), version, int(rank), int(num_ranks)))
    publisher.close()


def reader_main(channel: str, run_dir: str, mib: str) -> None:
    broadcast.PATIENCE_S = float(os.environ.get("TREE_PATIENCE_S", broadcast.PATIENCE_S))
    puller = make_puller(channel, RunDir(Path(run_dir)), specs(int(mib)), int(os.environ.get("FANOUT", "0")))
    answer({"ready": True, "transport": puller.transport})
    for command in map(json.loads, sys.stdin):
        version, incarnation, seconds = command["pull"]

        def on_progress(arrived: int, command: dict[str, int] = command) -> None:
            puller.on_progress = None
            if "stop" in command:
                stop_for_good(command["stop"])
            if "kill" in command:
                kill_for_good(command["kill"])
            if "announce" in command:
                answer({"started": True})

        puller.on_progress = on_progress
        try:
            staged = puller.pull(version, incarnation, time.monotonic() + seconds)
            answer({
                "differing": differing(staged, int(mib), version),
                "hanging": getattr(puller, "hanging", 0),
                "source": getattr(puller, "source", None),
            })  # fmt: skip
        except PullError as error:
            answer({"error": error.cause, "retryable": error.retryable, "hanging": getattr(puller, "hanging", 0)})
    puller.close()


def answer(value: object) -> None:
    print("#" + json.dumps(value), flush=True)


def main(role: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    {"publisher": publisher_main, "reader": reader_main}[role](*arguments)
