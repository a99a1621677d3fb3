"""What the agent examples learn: their reward curves.

    python benchmarks/agents_learn.py [--only NAME ...] [--output PREFIX]

Each example's own run.sh, unchanged: real runs on the CPU, one after the other. "reward" is that of the samples a step trained on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from report_machine import describe_machine

from psrl.telemetry.figures import finish, new_figure, smooth, style
from psrl.telemetry.metrics import read_metrics

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("multi_turn", "calculator", "black_box")
ENDS, SMOOTHING = 10, 9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--output", type=Path, help="write PREFIX.txt and PREFIX.png")
    args = parser.parse_args()
    rewards: dict[str, list[float]] = {}
    lines = [f"{'':12}{'steps':>6}{'first ten':>11}{'last ten':>10}{'turns':>7}"]
    with tempfile.TemporaryDirectory(prefix="psrl-agents-learn-") as scratch:
        for name in args.only:
            rows = run(name, Path(scratch) / name)
            own = rewards[name] = [row["critic/score/mean"] for row in rows]
            first, last = (statistics.fmean(part) for part in (own[:ENDS], own[-ENDS:]))
            lines.append(f"{name:12}{len(own):6}{first:11.3f}{last:10.3f}{rows[-1].get('num_turns/mean', 0):7.2f}")
            print(lines[-1], flush=True)
    text = "\n".join([f"$ python {' '.join(sys.argv)}", describe_machine(), "", *lines])
    print(text)
    if args.output:
        args.output.with_suffix(".txt").write_text(text + "\n")
        plot(rewards, args.output.with_suffix(".png"))
    return 0


def run(name: str, run_dir: Path) -> list[Mapping[str, float]]:
    command = [str(EXAMPLES / name / "run.sh"), f"run_dir={run_dir}", "trainer.report=False"]
    subprocess.run(command, check=True, env={**os.environ, "PSRL_PYTHON": sys.executable})
    return read_metrics(run_dir / "metrics.jsonl")


def plot(rewards: Mapping[str, Sequence[float]], path: Path) -> None:
    with style():
        figure, axes = new_figure((8, 4.6), 1, 1)
        for name, own in rewards.items():
            axes[0].plot(range(1, len(own) + 1), smooth(own, SMOOTHING), label=name)
        finish(axes[0], f"Reward of trained samples, moving mean of {SMOOTHING} steps", "reward", legend=True)
        figure.savefig(path, dpi=130)


if __name__ == "__main__":
    raise SystemExit(main())
