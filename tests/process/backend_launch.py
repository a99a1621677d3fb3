"""Start the ranks of `fsdp2_ranks`, or of another script, as processes and wait for all of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from forked import Forked, fork

DEADLINE_S = 300


def launch(
    tmp_path: Path, world_size: int, expect: int = 0, script: str = "fsdp2_ranks", **task
) -> list[dict[str, float]]:
    """Run all ranks to their end; the metrics that rank 0 printed. Every process is gone when this returns."""
    task = {"checkpoints": str(tmp_path / "checkpoints"), **task}
    return run_ranks(script, task, world_size, tmp_path, expect, on_gpu=task.get("device") == "cuda")


def run_ranks(
    script: str, task: dict, world_size: int, directory: Path, expect: int = 0, on_gpu: bool = False, **env: str
) -> list[dict]:
    """`main(TASK)` of a script on so many ranks (RANK, WORLD_SIZE), which meet at the file task["init"]. The JSON lines of rank 0."""
    place = Path(tempfile.mkdtemp(prefix="ranks-", dir=directory))
    text = json.dumps({"init": str(place / "init"), **task})
    ranks: list[Forked] = []
    try:
        for rank in range(world_size):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), **env}
            ranks.append(fork(script, [text], environment, place / f"{rank}.out", place / f"{rank}.err", on_gpu=on_gpu))
        codes = [rank.wait(DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(DEADLINE_S)
    said = [(place / f"{rank}.err").read_text() for rank in range(world_size)]
    assert codes == [expect] * world_size, "\n".join(said)
    return [json.loads(line) for line in (place / "0.out").read_text().splitlines() if line.startswith("{")]
