"""What each part of rollout coordination does to one and the same work, on real processes: a run each, laid side by side.

    python benchmarks/coordination.py [--steps N] [--only NAME ...] [--keep DIR]

Long-tailed responses, two instances on core 1 with few places each (as on a GPU whose KV cache is full), the trainer on
core 0. Every run starts from the same weights and trains the same number of groups; the learning rate is next to nothing, so
that the work stays the same while weights are published and pulled as ever. `--keep` leaves the runs and the page
that compares them in DIR.

Redundancy favours short responses: compare tokens/s and mean lengths (of what trained, and a lower bound for all that was
launched), not step times alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report_machine import describe_machine

from psrl.telemetry.metrics import read_metrics

WARMUP = 5
COORDINATION = "psrl.rollout_coordination."
ROUTING, SYNC = f"{COORDINATION}routing_strategy.", f"{COORDINATION}sync_and_mig_strategy."
REDUNDANT = f"{COORDINATION}redundant_rollout."
COMMON = [
    "preset=laptop", "trainer.logger=[console]", "trainer.save_freq=0", "psrl.staleness=1",
    "psrl.deployment.n_rollout_instances=2", "psrl.deployment.train_cores=[0]", "psrl.deployment.rollout_cores=[1]",
    "data.task=longtail_count", "data.max_prompt_length=32", "data.max_response_length=256",
    "model.tiny.warm_start_accuracy=0.6", "psrl.staleness_buffer_entries=8", "psrl.rollout_n=4",
    "gen_actor_rollout_ref.rollout.max_num_seqs=24", f"{ROUTING}max_concurrent_seqs_per_instance=24",
    "train_actor_rollout_ref.actor.optim.lr=1e-9",
]  # fmt: skip
CASES: dict[str, list[str]] = {
    "default": [],
    "partial rollout off": [f"{COORDINATION}partial_rollout.enable=False"],
    "12 groups for 8": [f"{REDUNDANT}enable=True", f"{REDUNDANT}redundant_global_batch_size=12"],
    "6 samples for 4": [f"{REDUNDANT}enable=True", f"{REDUNDANT}redundant_rollout_n=6"],
    "migration": [f"{SYNC}mig.enable=True", f"{SYNC}mig.threshold=2", f"{SYNC}mig.stop_threshold=4"],
    "sync by requests": [f"{SYNC}method=status_based", f"{SYNC}sync.threshold=8"],
    "sync by kv cache": [f"{SYNC}method=status_based", f"{SYNC}sync.indicator=kv_cache", f"{SYNC}sync.threshold=2"],
    "sync by gain": [f"{SYNC}method=status_based", f"{SYNC}sync.indicator=hypothesis_test", f"{SYNC}sync.threshold=0"],
    **{
        f"router {method}": [f"{ROUTING}method={method}"]
        for method in ("random", "round_robin", "cache_aware", "cache_aware_v1")
    },
    **{
        f"router {method}": [f"{ROUTING}method={method}", f"{ROUTING}cost_model_path=COST_MODEL"]
        for method in ("throughput_optimal", "throughput_optimal_with_budget")
    },
}
COUNTERS = ("pulls", "migrations", "interrupted_samples", "redundant")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psrl-coordination-")))
        base = scratch / "base"
        launch(base / "run", [*COMMON, "trainer.total_training_steps=1"])
        cost_model = base / "cost_model.json"
        if any("COST_MODEL" in override for name in args.only for override in CASES[name]):
            run("psrl.cost_model", "fit", "--repeats", "6", "--out", str(cost_model))
        runs = scratch / "runs"
        shared = [*COMMON, f"model={base / 'run' / 'model'}", f"trainer.total_training_steps={args.steps}"]
        for number, name in enumerate(args.only):
            own = [override.replace("COST_MODEL", str(cost_model)) for override in CASES[name]]
            launch(runs / f"{number:02}-{name.replace(' ', '_')}", [*shared, *own])
        run("psrl.report", str(runs))
        print(f"{describe_machine()}\n{args.steps} steps, one run each; trainer on core 0, two instances on core 1\n")
        print("\n".join(table(sorted(runs.glob("[0-9]*")))))
        if args.keep:
            print(f"\n{runs / 'report' / 'index.html'}")
    return 0


def launch(run_dir: Path, overrides: list[str]) -> None:
    run("psrl.launch", f"run_dir={run_dir}", *overrides)


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", *arguments], check=True, stdout=subprocess.DEVNULL)


def table(run_dirs: list[Path]) -> list[str]:
    head = f"{'':40} {'step s':>8} {'speed-up':>9} {'samples/s':>10} {'tokens/s':>9} {'mean length':>12} {'launched >=':>11} {'max lag':>8}  counts"
    lines, base = [head], 0.0
    for run_dir in run_dirs:
        rows = read_metrics(run_dir / "metrics.jsonl")
        steady = rows[WARMUP:-1]
        seconds = sum(row["timing_s/step"] for row in steady)
        step_s = seconds / len(steady)
        base = base or step_s
        summary = json.loads((run_dir / "summary.json").read_text())
        audit = subprocess.run([sys.executable, "-m", "psrl.audit", str(run_dir)], capture_output=True)
        samples = sum(row["training/num_samples"] for row in steady) / seconds
        length = statistics.fmean(row["response_length/mean"] for row in steady)
        launched = summary["length_at_least"]
        counts = " ".join(
            f"{key.partition('/')[2]}={rows[-1][key]:g}"
            for key in sorted(rows[-1])
            if key.startswith("rollout/") and any(name in key for name in COUNTERS)
        )
        lines.append(
            f"{run_dir.name:40} {step_s:8.3f} {base / step_s:9.2f} {samples:10.1f} {samples * length:9.0f} {length:12.1f} "
            f"{launched:11.1f} {summary['max_staleness']:8}  {counts} "
            f"{'audit clean' if audit.returncode == 0 else 'AUDIT FAILED'}"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
