"""Replays a recorded run with other settings, as one rank (RANK, WORLD_SIZE): `overlap_ranks.py TASK`, a JSON object.

{"run": DIR, "changes": {KEY: VALUE}, "init": FILE, "steps": N}: rank 0 prints a row of the loss curve a buffer as a line of
JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import reduce
from pathlib import Path

import torch.distributed as dist

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


def main(task: dict) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        timeout = timedelta(seconds=120)
        dist.init_process_group(
            "gloo", init_method=f"file://{task['init']}", rank=rank, world_size=world_size, timeout=timeout
        )
    run_dir = RunDir(Path(task["run"]))
    for row in Replay(run_dir, changed(run_dir, task["changes"])).rows(task["steps"]):
        if rank == 0:
            print(json.dumps(row), flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
