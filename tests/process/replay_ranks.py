"""Replays a recorded run with other settings on several ranks: `replay_on`; `main` is one rank (RANK, WORLD_SIZE).

`main('{"run": DIR, "init": FILE, "variants": {NAME: {KEY: VALUE}}}')`, one variant after the other in the same
processes: rank 0 prints a line of JSON a variant with its rows, one a buffer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import reduce
from pathlib import Path

import torch.distributed as dist
from backend_launch import run_ranks

from psrl.config.schema import Config
from psrl.role import load_config
from psrl.rundir.layout import RunDir
from psrl.trainer.replay import Replay


def changed(run_dir: RunDir, changes: Mapping[str, object]) -> Config:
    """The run's configuration with other values at some dotted keys."""
    config = load_config(run_dir)
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = reduce(getattr, parents, config)
        assert hasattr(section, last), key
        setattr(section, last, value)
    return config


def replay_on(
    world_size: int, run_dir: Path, variants: Mapping[str, Mapping[str, object]], directory: Path
) -> dict[str, list[dict[str, float]]]:
    """The loss curve of each variant on so many ranks. None of them is left."""
    task = {"run": str(run_dir), "variants": variants}
    found = run_ranks("replay_ranks", task, world_size, directory, GLOO_SOCKET_IFNAME="lo")
    return {one["variant"]: one["rows"] for one in found}


def main(text: str) -> None:
    task = json.loads(text)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task['init']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    run_dir = RunDir(Path(task["run"]))
    for name, changes in task["variants"].items():
        rows = list(Replay(run_dir, changed(run_dir, changes)).rows())
        if rank == 0:
            print(json.dumps({"variant": name, "rows": rows}), flush=True)
    dist.destroy_process_group()
