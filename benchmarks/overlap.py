"""What fine-grain overlap buys on this host: step time and hidden training work of each scope, with a rollout that fills its
buffer little by little.

    python benchmarks/overlap.py [--steps N] [--rounds N]

Staleness 0, so that nothing else overlaps: the trainer on core 0, the only instance on core 1, which decodes two groups at a
time. "hidden" is the share of the trainer's work on a buffer (reading, forward and backward passes, optimizer steps) that
was done before the buffer's last group was finished; without overlap it is 0 by definition.
The learning rate is next to nothing, so that all runs do the same work.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report_machine import describe_machine

WARMUP = 2
OVERLAP = "psrl.fine_grain_overlap"
ACTOR = "train_actor_rollout_ref.actor"
COMMON = [
    "preset=laptop", "trainer.logger=[console]", "trainer.save_freq=0", "psrl.staleness=0",
    "psrl.deployment.n_rollout_instances=1", "psrl.deployment.train_cores=[0]", "psrl.deployment.rollout_cores=[1]",
    "data.task=longtail_count", "data.max_prompt_length=32", "data.max_response_length=256",
    "model.tiny.warm_start_accuracy=0.6", f"{ACTOR}.optim.lr=1e-9",
    "psrl.staleness_buffer_entries=16", "psrl.rollout_n=8", "gen_actor_rollout_ref.rollout.max_num_seqs=16",
    f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
]  # fmt: skip
"""16 groups of 8 samples: 4 mini-batches of 32 samples, micro-batches of 8."""
CASES = {
    "none": [],
    "mini_batch, recompute": [f"{OVERLAP}.granularity=mini_batch"],
    "micro_batch, recompute": [f"{OVERLAP}.granularity=micro_batch"],
    "mini_batch, pre_step": [f"{OVERLAP}.granularity=mini_batch", f"{OVERLAP}.overlap_scope=pre_step"],
    "mini_batch, accumulate": [f"{OVERLAP}.granularity=mini_batch", f"{OVERLAP}.overlap_scope=accumulate"],
    "micro_batch, accumulate": [f"{OVERLAP}.granularity=micro_batch", f"{OVERLAP}.overlap_scope=accumulate"],
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", choices=CASES, nargs="*", default=list(CASES))
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in args.cases}
    with tempfile.TemporaryDirectory(prefix="psrl-overlap-") as scratch:
        model = Path(scratch, "base")
        launch(model, ["trainer.total_training_steps=1"])
        for number in range(args.rounds):
            for case, name in enumerate(args.cases):
                run_dir = Path(scratch, f"{number}-{case}")
                steps = f"trainer.total_training_steps={args.steps}"
                launch(run_dir, [f"model={model / 'model'}", steps, *CASES[name]])
                results[name].append(measure(run_dir))
    print(describe_machine())
    print(f"{args.steps} steps, {args.rounds} rounds, medians; trainer on core 0, one instance on core 1")
    print("\n".join(table(results)))
    return 0


def launch(run_dir: Path, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "psrl.launch", f"run_dir={run_dir}", *COMMON, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(run_dir: Path) -> dict[str, float]:
    """Means over the steps after the warm-up."""
    from psrl.telemetry.metrics import read_metrics

    rows = read_metrics(run_dir / "metrics.jsonl")[WARMUP:]

    def mean(key: str, missing: float = 0.0) -> float:
        return statistics.fmean(row.get(key, missing) for row in rows)

    return {
        "step": mean("timing_s/step"),
        "wait": mean("timing_s/wait_buffer"),
        "work": mean("timing_s/read") + mean("timing_s/update_actor"),
        "hidden": mean("overlap/hidden_fraction"),
        "tokens": mean("response_length/mean"),
        "reward": mean("critic/rewards/mean"),
    }


def table(results: dict[str, list[dict[str, float]]]) -> list[str]:
    def median(name: str, key: str) -> float:
        return statistics.median(result[key] for result in results[name])

    base = median(next(iter(results)), "step")
    lines = [
        f"{'':26} {'step s':>8} {'speed-up':>9} {'wait s':>8} {'work s':>8} {'hidden':>7} {'mean tokens':>12} {'reward':>7}"
    ]
    for name in results:
        step, wait, work, hidden, tokens, reward = (
            median(name, key) for key in ("step", "wait", "work", "hidden", "tokens", "reward")
        )
        lines.append(
            f"{name:26} {step:8.3f} {base / step:9.2f} {wait:8.3f} {work:8.3f} {hidden:7.2f} {tokens:12.1f} {reward:7.2f}"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
