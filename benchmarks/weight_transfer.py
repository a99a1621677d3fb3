"""Weight pulls against a plain copy of the same bytes in the same process: `python benchmarks/weight_transfer.py`.

One publisher process, 1 or 2 readers at once. A pull is everything that an instance waits for: ask, transfer, header,
checksum. "transfer" is the reads alone; by nixl it is fetched into the node's store and copied from there. Figures are medians; ratio = pull rate over the rate of `torch.Tensor.copy_`
measured right before it in that reader.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from psrl.rundir.keys import create_keys
from psrl.rundir.layout import RunDir
from psrl.trainer.backends.base import WeightShard
from psrl.weights.channel.filesystem import FilesystemPublisher, FilesystemPuller
from psrl.weights.channel.nixl_publisher import NixlPublisher
from psrl.weights.channel.nixl_puller import NixlPuller
from psrl.weights.channel.slot_header import HEADER_BYTES

WIDTH = 1024
TENSORS = 16
LIMIT_S = 120.0
COLUMNS = ("MiB", "readers", "pull_ms", "pull", "arrive", "copy", "ratio", "pack")


def rows(mib: int) -> int:
    return mib * 2**20 // (4 * WIDTH * TENSORS)


def publish(path: str, channel: str, mib: int, ready: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    run_dir = RunDir(Path(path))
    publisher: Any = FilesystemPublisher(run_dir, 0, 1) if channel == "filesystem" else NixlPublisher(run_dir, 0, 1)
    publisher.serve()
    shards = [WeightShard(f"w{i}", (rows(mib), WIDTH), 0, torch.randn(rows(mib), WIDTH)) for i in range(TENSORS)]
    publisher.publish(0, 0, shards)
    publisher.publish(1, 0, shards)  # both slots have been touched now
    done = publisher.publish(2, 0, shards)
    ready.put(done.nbytes / done.pack_s / 1e9)
    stop.wait(10 * LIMIT_S)
    publisher.close()


def read(path: str, channel: str, mib: int, rounds: int, start: Barrier, results: Any) -> None:
    torch.set_num_threads(1)
    expected = {f"w{i}": ((rows(mib), WIDTH), torch.float32) for i in range(TENSORS)}
    run_dir = RunDir(Path(path))
    puller: Any = (
        FilesystemPuller(run_dir, expected) if channel == "filesystem" else NixlPuller(run_dir, expected, route=channel)
    )
    marks: list[float] = []
    puller.on_progress = lambda _arrived: marks.append(time.perf_counter())
    source, target = torch.ones(mib * 2**20, dtype=torch.uint8), torch.zeros(mib * 2**20, dtype=torch.uint8)
    puller.pull(2, 0, time.monotonic() + LIMIT_S)  # meets the publisher, touches every page
    target.copy_(source)
    copies, pulls, transfers = [], [], []
    for _ in range(rounds):
        start.wait(LIMIT_S)
        begun = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - begun)
        if channel == "nixl":
            puller._transfers._store.slot(2, 0)[:HEADER_BYTES].zero_()  # what has been fetched is fetched again
        start.wait(LIMIT_S)
        marks.clear()
        begun = time.perf_counter()
        puller.pull(2, 0, time.monotonic() + LIMIT_S)
        pulls.append(time.perf_counter() - begun)
        transfers.append(marks[-1] - begun)
    results.put((statistics.median(copies), statistics.median(pulls), statistics.median(transfers), puller.transport))
    puller.close()


def measure(channel: str, mib: int, num_readers: int, rounds: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as path:
        RunDir(Path(path)).create()
        create_keys(RunDir(Path(path)))
        ready, results, stop = context.Queue(), context.Queue(), context.Event()
        start = context.Barrier(num_readers)
        publisher = context.Process(target=publish, args=(path, channel, mib, ready, stop))
        publisher.start()
        pack_gb_s = ready.get(timeout=LIMIT_S)
        readers = [
            context.Process(target=read, args=(path, channel, mib, rounds, start, results)) for _ in range(num_readers)
        ]
        for reader in readers:
            reader.start()
        found = [results.get(timeout=10 * LIMIT_S) for _ in readers]
        stop.set()
        for process in (*readers, publisher):
            process.join(LIMIT_S)
    nbytes = mib * 2**20
    copy_s, pull_s, transfer_s = (statistics.mean(column) for column in list(zip(*found, strict=True))[:3])
    return {
        "transport": found[0][3], "MiB": mib, "readers": num_readers, "pull_ms": 1e3 * pull_s,
        "pull": nbytes / pull_s / 1e9, "arrive": nbytes / transfer_s / 1e9, "copy": nbytes / copy_s / 1e9,
        "ratio": copy_s / pull_s, "pack": pack_gb_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--channels", nargs="+", default=["shm", "nixl", "filesystem"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    table = []
    print(f"{'transport':24}" + "".join(f"{name:>8}" for name in COLUMNS))
    for channel in args.channels:
        for mib in args.sizes_mib:
            for num_readers in args.readers:
                row = measure(channel, mib, num_readers, args.rounds)
                table.append(row)
                print(f"{row['transport']:24}" + "".join(f"{row[name]:8.4g}" for name in COLUMNS), flush=True)
    print("GB/s of one reader: pull = the whole pull, arrive = until the last byte is there, copy = plain copy")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
