"""Start the ranks of `fsdp2_ranks.py`, or of another script, as processes and wait for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("fsdp2_ranks.py")
DEADLINE_S = 300


def launch(tmp_path: Path, world_size: int, expect: int = 0, script: Path = SCRIPT, **task) -> list[dict[str, float]]:
    """Run all ranks to their end; the metrics that rank 0 printed. Every process is gone when this returns."""
    task = {"checkpoints": str(tmp_path / "checkpoints"), "init": str(tmp_path / f"init{os.urandom(4).hex()}"), **task}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(task)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.returncode for p in processes] == [expect] * world_size, outputs[0][1] + outputs[-1][1]
    return [json.loads(line) for line in outputs[0][0].splitlines() if line.startswith("{")]
