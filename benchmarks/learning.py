"""What is learned: every algorithm preset on the laptop's task, or staleness with and without rollout correction.

    python benchmarks/learning.py [--algorithms NAME ...] [--steps N] [--output PREFIX]
    python benchmarks/learning.py --correction [--seeds N] [--steps N] [--output PREFIX] [--more KEY=VALUE ...]

Real runs of `python -m psrl.launch`, one after the other, all from the same warm-started model. "reward" is that of the samples
a step trained on, hence of older weights, and after dynamic sampling (dapo) only of groups that are neither all right nor all
wrong: it cannot tell there how good the policy is. "validated" is the mean reward of answers at temperature 1 to fixed
prompts of the same task, of exactly one version of the weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from omegaconf import OmegaConf
from report_machine import describe_machine

from psrl.config.compose import compose_config, normalise
from psrl.tasks.registry import build_task, task_spec
from psrl.telemetry.figures import series, smooth, total_histogram
from psrl.telemetry.metrics import Row, read_metrics

ALGORITHMS = ("grpo", "dr_grpo", "rloo", "remax", "reinforce_plus_plus", "ppo", "dapo", "gspo", "cispo")
LEARNED = 0.15
"""A preset learns if it raises the validated reward by this much: some three standard errors of the rise."""
PROMPTS, ANSWERS = 32, 4
"""What a validation asks for."""
ENDS = 10
"""Steps of which "first" and "last" are the mean."""
SMOOTHING = 9
ACTOR = "train_actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
COMMON = [
    "preset=laptop", "trainer.logger=[console]", "trainer.save_freq=0", "psrl.deployment.n_rollout_instances=1",
    "psrl.staleness_buffer_entries=16",
]  # fmt: skip
ALGORITHM_SETTING = [
    f"{ACTOR}.ppo_mini_batch_size=8", "psrl.deployment.n_validate_instances=1", "trainer.test_freq=20",
    f"data.val_max_samples={PROMPTS}", f"gen_actor_rollout_ref.rollout.val_kwargs.n={ANSWERS}", "gen_actor_rollout_ref.rollout.val_kwargs.temperature=1",
]  # fmt: skip
"""Two optimizer steps a buffer, so that the losses differ: in a single one every ratio is 1."""
CORRECTION_SETTING = [
    f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.optim.lr=5e-4", f"{ACTOR}.optim.lr_scheduler_type=constant",
    "gen_actor_rollout_ref.rollout.dtype=bfloat16",
]  # fmt: skip
"""Four optimizer steps a buffer and an engine that rounds differently: the samples are far from the policy."""
CORRECTION_CASES = {
    "staleness 0": ["psrl.staleness=0", f"{CORRECTION}.rollout_is=null"],
    "staleness 4, no correction": ["psrl.staleness=4", f"{CORRECTION}.rollout_is=null"],
    "staleness 4, token weights": ["psrl.staleness=4", f"{CORRECTION}.rollout_is=token"],
}


@dataclass(frozen=True, slots=True)
class Curves:
    """One run: trained rewards by step, validated rewards by version, groups by lag, seconds of all steps."""

    rewards: list[float]
    validated: list[tuple[float, float]]
    lags: dict[int, int]
    seconds: float
    rows: list[Row]

    @property
    def mean_lag(self) -> float:
        return sum(lag * count for lag, count in self.lags.items()) / max(sum(self.lags.values()), 1)

    @property
    def first(self) -> float:
        return statistics.fmean(self.rewards[:ENDS])

    @property
    def last(self) -> float:
        return statistics.fmean(self.rewards[-ENDS:])

    @property
    def rise(self) -> float:
        return self.validated[-1][1] - self.validated[0][1]

    def mean(self, key: str) -> float:
        """Over the steps."""
        return statistics.fmean(series(self.rows, key)[1])


def run(directory: Path, overrides: Sequence[str]) -> Curves:
    """What a run did; one that is there and is complete is only read, an interrupted one goes on."""
    if not _completed(directory / "summary.json"):
        command = [sys.executable, "-m", "psrl.launch", f"run_dir={directory}", *COMMON, *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows, validation = read_metrics(directory / "metrics.jsonl"), directory / "validation.jsonl"
    validated = read_metrics(validation) if validation.is_file() else []
    return Curves(
        rewards=series(rows, "critic/rewards/mean")[1],
        validated=sorted((row["val/version"], row["val/reward_mean"]) for row in validated),
        lags=total_histogram(rows, "staleness/hist"),
        seconds=sum(row["timing_s/step"] for row in rows),
        rows=rows,
    )


def _completed(summary: Path) -> bool:
    return summary.is_file() and json.loads(summary.read_text())["status"] == "completed"


def warm_started(directory: Path) -> str:
    """The override that starts a run from one warm-started model, which a run of one step makes."""
    run(directory / "base", ["trainer.total_training_steps=1"])
    return f"model={directory / 'base' / 'model'}"


def write_prompts(path: Path) -> str:
    """The override that validates on `PROMPTS` different prompts of the training task."""
    config = OmegaConf.to_object(compose_config(normalise(COMMON, has_accelerator=False, on_slurm=False)[0]))
    different = {item.messages[0]["content"]: item.ground_truth for item in build_task(task_spec(config)).items()}
    rows = [
        {"prompt": prompt, "data_source": "digit_sum", "reward_model": {"ground_truth": answer}}
        for prompt, answer in islice(different.items(), PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.val_files={path}"


def algorithms(directory: Path, names: Sequence[str], setting: Sequence[str]) -> dict[str, Curves]:
    start = [warm_started(directory), write_prompts(directory / "prompts.jsonl"), *setting]
    results = {}
    for name in names:
        results[name] = run(directory / name, [*start, f"algorithm={name}"])
        _say(name, results[name])
    return results


def corrections(directory: Path, seeds: int, setting: Sequence[str]) -> dict[str, list[Curves]]:
    results: dict[str, list[Curves]] = {name: [] for name in CORRECTION_CASES}
    start = [warm_started(directory), *setting]
    for seed in range(seeds):  # seed by seed, so that a slow hour of the machine meets all cases
        for number, (name, overrides) in enumerate(CORRECTION_CASES.items()):
            results[name].append(run(directory / f"{seed}-{number}", [*start, f"seed={seed}", *overrides]))
            _say(f"{name}, seed {seed}", results[name][-1])
    return results


def _say(name: str, curves: Curves) -> None:
    line = f"{name}: reward {curves.first:.2f} -> {curves.last:.2f}, mean lag {curves.mean_lag:.2f}"
    print(line, file=sys.stderr, flush=True)


def algorithm_table(results: Mapping[str, Curves]) -> list[str]:
    lines = [
        f"{'':20}{'reward':>16}{'validated':>18}{'':10}{'staleness':>14}",
        f"{'algorithm':20}{'first':>8}{'last':>8}{'first':>10}{'last':>8}{'learned':>10}{'mean':>8}{'most':>6}{'steps':>7}{'seconds':>9}",
    ]
    for name, c in results.items():
        lines.append(
            f"{name:20}{c.first:8.2f}{c.last:8.2f}{c.validated[0][1]:10.2f}"
            f"{c.validated[-1][1]:8.2f}{'yes' if c.rise >= LEARNED else 'NO':>10}{c.mean_lag:8.2f}{max(c.lags):6}{len(c.rewards):7}{c.seconds:9.1f}"
        )
    return lines


def correction_table(results: Mapping[str, Sequence[Curves]]) -> list[str]:
    lines = [
        f"{'mean +- std over seeds':28}{'lag':>6}{'k3 KL':>9}{'last reward':>16}{'mean reward':>16}{'grad norm':>11}"
    ]
    for name, seeds in results.items():
        lag, kl, norm = (
            statistics.fmean(values)
            for values in (
                [c.mean_lag for c in seeds],
                [c.mean("rollout_corr/k3_kl") for c in seeds],
                [c.mean("actor/grad_norm") for c in seeds],
            )
        )
        last, whole = _spread([c.last for c in seeds]), _spread([statistics.fmean(c.rewards) for c in seeds])
        lines.append(f"{name:28}{lag:6.2f}{kl:9.4f}{last:>16}{whole:>16}{norm:11.2f}")
    lags = {name: total_histogram([{"lags": c.lags} for c in seeds], "lags") for name, seeds in results.items()}
    return [*lines, "", "groups by lag:", *(f"  {name}: {counts}" for name, counts in lags.items())]


def _spread(values: Sequence[float]) -> str:
    """`_spread([0.5, 0.7]) == "0.60 +- 0.14"`"""
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.2f} +- {std:.2f}"


def plot(results: Mapping[str, Sequence[Curves]], path: Path) -> None:
    """Left the trained rewards, smoothed, right the validated ones (if any): means over seeds, bands of a standard deviation."""
    from matplotlib import colormaps

    from psrl.telemetry.figures import finish, new_figure, style

    validated = all(c.validated for seeds in results.values() for c in seeds)
    with style():
        figure, axes = new_figure((13, 4.6) if validated else (8, 4.6), 1, 1 + validated)
        for number, (name, seeds) in enumerate(results.items()):
            colour = colormaps["tab10"](number)
            _band(axes[0], [dict(enumerate(smooth(c.rewards, SMOOTHING), 1)) for c in seeds], colour, name)
            if validated:
                _band(axes[1], [dict(c.validated) for c in seeds], colour, name)
        finish(axes[0], f"Reward of trained samples, moving mean of {SMOOTHING} steps", "reward", legend=not validated)
        if validated:
            finish(axes[1], "Reward of one version on fixed prompts", "reward", xlabel="version", legend=True)
        figure.savefig(path, dpi=130)


def _band(axes, curves: Sequence[Mapping[float, float]], colour, name: str) -> None:
    at = [x for x in curves[0] if all(x in curve for curve in curves)]
    columns = [[curve[x] for curve in curves] for x in at]
    means = [statistics.fmean(column) for column in columns]
    axes.plot(at, means, color=colour, label=name)
    if len(curves) > 1:
        deviations = [statistics.stdev(column) for column in columns]
        low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--correction", action="store_true", help="staleness 0 against 4 with and without correction")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3, help="of --correction")
    parser.add_argument("--more", nargs="*", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--runs", type=Path, help="keep the runs here, and do not repeat those that are there")
    parser.add_argument("--output", type=Path, help="write PREFIX.txt and PREFIX.png")
    args = parser.parse_args()
    setting = [*(CORRECTION_SETTING if args.correction else ALGORITHM_SETTING), *args.more]
    length = f"trainer.total_training_steps={args.steps}"
    with tempfile.TemporaryDirectory(prefix="psrl-learning-") as scratch:
        directory = (args.runs or Path(scratch)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        if args.correction:
            seeded = corrections(directory, args.seeds, [*setting, length])
            lines = correction_table(seeded)
        else:
            curves = algorithms(directory, args.algorithms, [*setting, length])
            seeded = {name: [c] for name, c in curves.items()}
            lines = algorithm_table(curves)
    lines = [describe_machine(), f"{args.steps} steps of {' '.join([*COMMON, *setting])}", "", *lines]
    print("\n".join(lines))
    if args.output:
        chosen = "--correction" if args.correction else f"--algorithms {' '.join(args.algorithms)}"
        more = f" --more {' '.join(args.more)}" if args.more else ""
        command = f"$ python benchmarks/learning.py {chosen} --steps {args.steps}{more}"
        args.output.with_suffix(".txt").write_text("\n".join([command, *lines]) + "\n")
        plot(seeded, args.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
