"""What asynchrony buys on this host: step time at staleness 0 and 2, and partial rollout on against off, on the same work.

    python benchmarks/staleness.py [--steps N] [--rounds N]

Trainer on core 0, the instance on core 1, in every run: with shared cores the work that overlaps would slow each other and
hide the effect. "of the ceiling" is max(rollout busy, train busy) x step time over step time: 1 means that the busier side
never waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report_machine import describe_machine

WARMUP = 5
COMMON = [
    "preset=laptop", "trainer.logger=[console]", "trainer.save_freq=0", "psrl.deployment.n_rollout_instances=1",
    "psrl.deployment.train_cores=[0]", "psrl.deployment.rollout_cores=[1]",
]  # fmt: skip
SHORT: list[str] = []
LONG = [
    "data.task=longtail_count", "data.max_prompt_length=32", "data.max_response_length=256",
    "model.tiny.warm_start_accuracy=0.6", "psrl.staleness_buffer_entries=8", "psrl.rollout_n=8", "train_actor_rollout_ref.actor.optim.lr=3e-4",
]  # fmt: skip
PARTIAL = "psrl.rollout_coordination.partial_rollout.enable"
CASES = {
    "short": (SHORT, {"staleness 0": ["psrl.staleness=0"], "staleness 2": ["psrl.staleness=2"]}),
    "long-tailed": (
        LONG,
        {
            "staleness 0": ["psrl.staleness=0"],
            "staleness 2": ["psrl.staleness=2"],
            "staleness 2, partial rollout off": ["psrl.staleness=2", f"{PARTIAL}=False"],
        },
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", choices=CASES, nargs="*", default=list(CASES))
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory(prefix="psrl-staleness-") as scratch:
        for work in args.work:
            common, cases = CASES[work]
            model = Path(scratch, work, "base")
            launch(model, [*COMMON, *common, "trainer.total_training_steps=1"])
            results: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
            for number in range(args.rounds):
                for name, overrides in cases.items():
                    run_dir = Path(scratch, work, f"{number}-{name.replace(' ', '_').replace(',', '')}")
                    launch(
                        run_dir,
                        [
                            *COMMON,
                            *common,
                            f"model={model / 'model'}",
                            f"trainer.total_training_steps={args.steps}",
                            *overrides,
                        ],
                    )
                    results[name].append(measure(run_dir))
            lines += table(work, results)
    print(describe_machine())
    print(f"{args.steps} steps, {args.rounds} rounds, medians; trainer on core 0, one instance on core 1")
    print("\n".join(lines))
    return 0


def launch(run_dir: Path, overrides: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "psrl.launch", f"run_dir={run_dir}", *overrides], check=True, stdout=subprocess.DEVNULL
    )


def measure(run_dir: Path) -> dict[str, float]:
    from psrl.telemetry.metrics import read_metrics

    rows = read_metrics(run_dir / "metrics.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = [row["timing_s/step"] for row in rows[WARMUP:-1]]
    return {
        "step_s": statistics.fmean(steps),
        "rollout": summary["rollout_busy_fraction"],
        "train": summary["train_busy_fraction"],
        "lag": summary["max_staleness"],
        "reward": statistics.fmean(row["critic/rewards/mean"] for row in rows[-10:]),
        "tokens": statistics.fmean(row["response_length/mean"] for row in rows[WARMUP:]),
    }


def table(work: str, results: dict[str, list[dict[str, float]]]) -> list[str]:
    def median(name: str, key: str) -> float:
        return statistics.median(r[key] for r in results[name])

    base = median("staleness 0", "step_s")
    head = f"{work:34} {'step s':>8} {'speed-up':>9} {'rollout busy':>13} {'train busy':>11} {'of the ceiling':>15} {'max lag':>8} {'mean tokens':>12} {'reward':>7}"
    lines = ["", head]
    for name in results:
        step_s, rollout, train = (median(name, key) for key in ("step_s", "rollout", "train"))
        lines.append(
            f"  {name:32} {step_s:8.3f} {base / step_s:9.2f} {rollout:13.2f} {train:11.2f} {max(rollout, train):15.2f} "
            f"{median(name, 'lag'):8.0f} {median(name, 'tokens'):12.1f} {median(name, 'reward'):7.2f}"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
