"""Runs of psrl for a benchmark, each a `psrl.launch` of its own."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POLL_S = 0.2


def run_all(
    runs: Mapping[Path, Sequence[str]], gpus: Sequence[str | None], *, minutes: float, enough_steps: int
) -> list[str]:
    """Run directory -> overrides, one at a time on each of `gpus` (CUDA_VISIBLE_DEVICES; None: as it is), as long as one that takes no
    longer than the longest so far would end within `minutes`. One that has made `enough_steps` makes room for the start of the next.
    Returns the names of those that failed."""
    end_s, took_s = time.monotonic() + 60 * minutes, [0.0]
    failed: list[str] = []
    free: queue.Queue[str | None] = queue.Queue()
    for each in gpus:
        free.put(each)

    def run(run_dir: Path, overrides: Sequence[str], own: str | None) -> None:
        begun_s, gone = time.monotonic(), threading.Event()

        def leave() -> None:
            if not gone.is_set():
                gone.set()
                took_s.append(time.monotonic() - begun_s)
                free.put(own)

        def leave_in_time() -> None:
            if steps_made(run_dir) >= enough_steps:
                leave()

        try:
            launch(run_dir, overrides, {} if own is None else {"CUDA_VISIBLE_DEVICES": own}, leave_in_time)
        except (SystemExit, OSError) as error:
            failed.append(run_dir.name)
            print(f"{error}", flush=True)
        leave()
        took_s.append(time.monotonic() - begun_s)
        print(f"{run_dir.name}: {took_s[-1]:.0f} s with its start", flush=True)

    threads = []
    for run_dir, overrides in runs.items():
        own = free.get()
        if time.monotonic() + max(took_s) > end_s:
            print(f"no time is left for {run_dir.name}: call again", flush=True)
            free.put(own)
            continue
        threads.append(threading.Thread(target=run, args=(run_dir, overrides, own)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return failed


def gpu_sets(gpus: int, at_once: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES for each of `at_once` runs, from those that this process may use."""
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus * at_once)))).split(",")
    return [",".join(names[i : i + gpus]) for i in range(0, gpus * at_once, gpus)]


def completed(run_dir: Path) -> bool:
    summary = run_dir / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "completed"


def steps_made(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def launch(
    run_dir: Path,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """One run, to its end; `meanwhile` is called again and again. Its output goes beside it, and is in the SystemExit if it fails. Its
    checkpoint, of no use here, is removed."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_name(f"{run_dir.name}.log")
    with log.open("wb") as out:
        command = [sys.executable, "-m", "psrl.launch", f"run_dir={run_dir}", *overrides]
        with subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        ) as ran:
            while ran.poll() is None:
                meanwhile()
                time.sleep(POLL_S)
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    if ran.returncode:
        tails = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in [log, *sorted(run_dir.glob("logs/*.log"))]
        ]
        raise SystemExit("\n".join([*tails, f"{run_dir.name} ended with {ran.returncode}"]))
