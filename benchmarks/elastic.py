"""What joined instances bring: tokens/s of one run before, while and after more instances are there.

    python benchmarks/elastic.py [--join N] [--steps N]

The run's own instance may have few sequences at a time, as on a GPU whose KV cache is full, so that rollout is what the
run waits for. The joiner is started and ended (SIGTERM) from outside, as a preemptible job would be.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from report_machine import describe_machine

from psrl.telemetry.metrics import read_metrics

STEP, TOKENS, SECONDS = "training/global_step", "perf/total_num_tokens", "timing_s/step"
DEADLINE_S = 600.0
OVERRIDES = [
    "preset=laptop", "trainer.logger=[console]", "trainer.save_freq=0", "psrl.deployment.n_rollout_instances=1",
    "data.task=longtail_count", "data.max_prompt_length=32", "data.max_response_length=256", "model.tiny.warm_start_steps=0",
    "gen_actor_rollout_ref.rollout.ignore_eos=True", "gen_actor_rollout_ref.rollout.max_num_seqs=8",
    "psrl.rollout_coordination.routing_strategy.max_concurrent_seqs_per_instance=8",
    "psrl.staleness_buffer_entries=2", "psrl.rollout_n=4", "psrl.staleness=2",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", type=int, default=2, help="instances that join")
    parser.add_argument("--steps", type=int, default=15, help="steps of each of the three parts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="psrl-elastic-") as scratch:
        run_dir = Path(scratch, "run")
        total = f"trainer.total_training_steps={1000 * args.steps}"  # ended long before
        run = subprocess.Popen(
            [sys.executable, "-m", "psrl.launch", f"run_dir={run_dir}", total, *OVERRIDES], stdout=subprocess.DEVNULL
        )
        marks = []
        wait(run, lambda: last_step(run_dir) >= args.steps)
        marks.append(last_step(run_dir))
        joiner = subprocess.Popen(
            [sys.executable, "-m", "psrl.join", str(run_dir), "--instances", str(args.join)], stdout=subprocess.DEVNULL
        )
        wait(run, lambda: len(list(run_dir.glob("timeline/instance-join-*"))) == args.join)
        marks.append(last_step(run_dir) + 2)  # they have weights, and their first groups are under way
        wait(run, lambda: last_step(run_dir) >= marks[1] + args.steps)
        marks.append(last_step(run_dir))
        joiner.send_signal(signal.SIGTERM)
        left = joiner.wait(DEADLINE_S)
        marks.append(last_step(run_dir) + 1)
        wait(run, lambda: last_step(run_dir) >= marks[3] + args.steps)
        marks.append(last_step(run_dir))
        run.send_signal(signal.SIGINT)
        run.wait(DEADLINE_S)
        rows = read_metrics(run_dir / "metrics.jsonl")
        parts = {
            "1 instance": (5, marks[0]),
            f"{1 + args.join} instances": (marks[1], marks[2]),
            "1 instance again": (marks[3], marks[4]),
        }
        print(f"{describe_machine()}\njoiner's exit code {left}")
        for name, (first, last) in parts.items():
            speeds = [row[TOKENS] / row[SECONDS] for row in rows if first < row[STEP] <= last]
            print(
                f"{name:<18} steps {first + 1:>3} to {last:>3}: median {statistics.median(speeds):7.0f} trained tokens/s"
            )
    return 0


def last_step(run_dir: Path) -> int:
    rows = read_metrics(run_dir / "metrics.jsonl")
    return rows[-1][STEP] if rows else 0


def wait(run: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run ended with {run.returncode} or took longer than {DEADLINE_S:g} s")
        time.sleep(0.2)


if __name__ == "__main__":
    raise SystemExit(main())
