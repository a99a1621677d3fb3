"""How well a simulation predicts real runs: step time and busy shares of staleness 0 and 2, after calibration on a third run.

    python benchmarks/simulate_accuracy.py [--steps N] [--work short long-tailed] [--keep DIR]

The third run is synchronous and has another seed. The learning rate is next to nothing, so that all runs generate responses of
one and the same distribution: a simulation foresees time, not how a policy's answers grow or shrink while it learns. Trainer on core 0, instance on core 1, as in benchmarks/staleness.py, so
that neither takes time from the other; a machine that does other work meanwhile spoils the figures. Exit status 1 if a
prediction is off by more than 15%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from report_machine import describe_machine
from staleness import COMMON, LONG, SHORT, launch

from psrl.config.command_line import prepare_overrides
from psrl.simulate.__main__ import prepare
from psrl.simulate.build import simulate
from psrl.simulate.calibrate import WARMUP_STEPS, calibrate, describe
from psrl.telemetry.metrics import read_metrics
from psrl.telemetry.summary import TRAIN_BUSY, busy_over
from psrl.telemetry.timeline import BUSY, PUSH
from psrl.telemetry.timeline_read import by_name, read_timeline

WORK = {"short": SHORT, "long-tailed": LONG}
STALENESS = (0, 2)
STILL = "train_actor_rollout_ref.actor.optim.lr=1e-9"
LIMIT = 0.15
LEAST_STEPS = 50


@dataclass(frozen=True, slots=True)
class Figures:
    step_s: float
    rollout: float
    train: float
    tokens: float
    """Mean length of a response."""


def measure(run_dir: Path) -> Figures:
    """Of a real run, without the first steps and the last, which writes a checkpoint."""
    rows = read_metrics(run_dir / "metrics.jsonl")[WARMUP_STEPS:-1]
    tracks = read_timeline(run_dir / "timeline")
    trainer = next(iter(by_name(tracks, "trainer").values()))
    pushed = [span.end_s for span in trainer if span.name == PUSH]
    windows = [(pushed[WARMUP_STEPS], pushed[-2])]
    instances = by_name(tracks, "instance").values()
    return Figures(
        statistics.fmean(row["timing_s/step"] for row in rows),
        statistics.fmean(busy_over(spans, windows, (BUSY,)) for spans in instances),
        busy_over(trainer, windows, TRAIN_BUSY),
        statistics.fmean(row["response_length/mean"] for row in rows),
    )


def predict(overrides: Sequence[str], calibration: Path, steps: int) -> Figures:
    own = [
        f"simulation.calibration={calibration}",
        f"simulation.steps={steps}",
        f"simulation.warmup_steps={WARMUP_STEPS}",
    ]
    config, simulation = prepare(prepare_overrides([*overrides, *own]))
    r = simulate(config, simulation)
    return Figures(r.step_s, r.rollout_busy, r.train_busy, r.mean_length_consumed)


def compare(work: str, steps: int, scratch: Path) -> tuple[list[str], bool]:
    """(lines of the table, whether every prediction is within the limit)."""
    common = [*COMMON, *WORK[work]]
    launch(scratch / "base", [*common, "trainer.total_training_steps=1"])
    common += [STILL, f"model={scratch / 'base' / 'model'}", f"trainer.total_training_steps={steps}"]
    launch(scratch / "third", [*common, "psrl.staleness=0", "seed=7", "data.seed=7"])
    found = calibrate(scratch / "third")
    found.save(scratch / "calibration.json")
    lines = ["", f"{work}, calibrated on a third run:", *(f"  {line}" for line in describe(found))]
    lines.append(f"  {'':14}{'step s':>18}{'rollout busy':>18}{'train busy':>18}{'mean tokens':>18}")
    good = True
    for staleness in STALENESS:
        own = [*common, f"psrl.staleness={staleness}"]
        launch(scratch / str(staleness), own)
        real, guess = measure(scratch / str(staleness)), predict(own, scratch / "calibration.json", steps)
        shown = [f"{getattr(real, n):.3f} -> {getattr(guess, n):.3f}" for n in ("step_s", "rollout", "train", "tokens")]
        off = [getattr(guess, n) / getattr(real, n) - 1 for n in ("step_s", "rollout", "train")]
        good = good and max(map(abs, off)) <= LIMIT
        lines.append(f"  staleness {staleness:<4}" + "".join(f"{cell:>18}" for cell in shown))
        lines.append(f"  {'off by':14}" + "".join(f"{value:>+18.1%}" for value in off))
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--work", choices=WORK, nargs="*", default=["long-tailed"])
    parser.add_argument("--keep", type=Path, help="keep the runs below this directory")
    args = parser.parse_args()
    if args.steps < LEAST_STEPS:
        parser.error(f"--steps {args.steps}: at least {LEAST_STEPS}")
    lines, good = [], True
    with tempfile.TemporaryDirectory(prefix="psrl-accuracy-") as temporary:
        for work in args.work:
            more, fine = compare(work, args.steps, (args.keep or Path(temporary)) / work)
            lines += more
            good = good and fine
    print(describe_machine())
    print(f"{args.steps} steps a run, the first {WARMUP_STEPS} not counted; measured -> simulated")
    print("\n".join(lines))
    print(json.dumps({"within_15_percent": good}))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
