"""Replays a recorded run with other settings on several ranks: `replay_on`; run as a script it is one rank (RANK, WORLD_SIZE).

`replay_ranks.py '{"run": DIR, "init": FILE, "variants": {NAME: {KEY: VALUE}}}'`, one variant after the other in the same
processes: rank 0 prints a line of JSON a variant with its rows, one a buffer.
"""

from __future__ import annotations

import json
import os
import subprocess
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

DEADLINE_S = 300


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
    world_size: int, run_dir: Path, variants: Mapping[str, Mapping[str, object]], init: Path
) -> dict[str, list[dict[str, float]]]:
    """The loss curve of each variant on so many ranks, which meet at the new file `init`. None of them is left."""
    task = json.dumps({"run": str(run_dir), "init": str(init), "variants": variants})
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, task],
            env=environment | {"WORLD_SIZE": str(world_size), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * world_size
    found = [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]
    return {one["variant"]: one["rows"] for one in found}


def main(task: dict) -> None:
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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
