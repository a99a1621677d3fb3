"""`python -m psrl.cost_model fit | show`: measure what a decode step costs here, or look at a cost model."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

from psrl.config.errors import ConfigError
from psrl.cost_model.files import check_key, load_cost_model, load_cost_models, save_cost_model, shipped_cost_models
from psrl.cost_model.fit import FitError, StepTime, fit_cost_model, hold_out
from psrl.cost_model.measure import MeasureError, Measurement, grid, measure
from psrl.cost_model.plot import save_fit_plot, save_model_plot
from psrl.cost_model.table import coefficient_line, fit_lines, show_lines, summarize

NUMS_SEQS = (1, 2, 4, 8, 16, 32, 64)
TOKENS_PER_SEQ = (32, 64, 128, 256, 512)
CPU, WALL = "cpu", "wall"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return _fit(args) if args.command == "fit" else _show(args)
    except (ConfigError, FitError, MeasureError, OSError) as error:
        print(f"psrl.cost_model: {error}", file=sys.stderr)
        return 2


def _fit(args: argparse.Namespace) -> int:
    _check(args)
    from psrl.cost_model.engine import make_engine

    points = grid(args.num_seqs, args.tokens_per_seq)
    engine = make_engine(args.model, args.dtype, args.threads, points, args.steps)
    begun = time.monotonic()
    try:
        measured = measure(
            engine, points, repeats=args.repeats, steps=args.steps, seed=args.seed, progress=_progress_line()
        )
    finally:
        engine.close()
    clock = args.clock or (CPU if args.threads == 1 else WALL)
    times = step_times(measured, clock)
    held_out = hold_out(len(times), args.hold_out, np.random.default_rng(args.seed))
    model = fit_cost_model([p for i, p in enumerate(times) if i not in held_out])
    print(_machine_line(args, clock, time.monotonic() - begun))
    print("\n".join(fit_lines(model, measured, times, held_out)))
    print(coefficient_line(model))
    print(f"error on fitted points:   {summarize(model, [p for i, p in enumerate(times) if i not in held_out])}")
    if held_out:
        print(f"error on held-out points: {summarize(model, [times[i] for i in sorted(held_out)])}")
    save_cost_model(args.out, args.key, model)
    plot = args.plot or args.out.with_suffix(".svg")
    save_fit_plot(plot, model, times, held_out, f"{args.model}, {args.key}, {clock} time")
    print(f"written: {args.out} ({args.key}), {plot}")
    return 0


def _show(args: argparse.Namespace) -> int:
    model = load_cost_model(args.name, args.key or next(iter(load_cost_models(args.name))))
    print(coefficient_line(model))
    print("\n".join(show_lines(model, args.num_seqs, args.tokens_per_seq)))
    if args.plot:
        save_model_plot(args.plot, model, args.num_seqs, args.tokens_per_seq, str(args.name))
        print(f"written: {args.plot}")
    return 0


def step_times(measured: Sequence[Measurement], clock: str) -> list[StepTime]:
    return [
        StepTime(num_seqs=m.point.num_seqs, kv_tokens=m.kv_tokens, latency_s=m.cpu_s if clock == CPU else m.wall_s)
        for m in measured
    ]


def _check(args: argparse.Namespace) -> None:
    """What argparse cannot tell, before anything is measured."""
    check_key(args.key)
    if not 0 <= args.hold_out < 1:
        raise ConfigError(f"--hold-out {args.hold_out} is refused: it must be a share in [0, 1).")
    if len(set(args.num_seqs)) < 2 or len(set(args.tokens_per_seq)) < 2:
        raise ConfigError("--num-seqs and --tokens-per-seq need at least two different values each.")
    if args.out.exists():
        load_cost_models(args.out.absolute())  # its other entries stay, so it must be a cost model


def _progress_line():
    """Tells how far it is, on a terminal only."""
    if not sys.stderr.isatty():
        return lambda done, total: None

    def tell(done: int, total: int) -> None:
        print(f"\r{done} of {total} visits", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return tell


def _machine_line(args: argparse.Namespace, clock: str, seconds: float) -> str:
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    packages = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
    return (
        f"{args.model}, {args.threads} thread{'s' * (args.threads > 1)}, {clock} time, {args.repeats} visits of {args.steps} steps in {seconds:.0f} s; "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M}Z, {names[0] if names else platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {packages}"
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m psrl.cost_model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser(
        "fit", help="measure decode steps over a grid, fit the coefficients, write JSON and a plot"
    )
    fit.add_argument("--out", type=Path, required=True, help="JSON file; entries under other keys stay")
    fit.add_argument("--model", default="tiny", help="tiny, or a Hugging Face model directory (default: %(default)s)")
    fit.add_argument(
        "--dtype", default="float32", help="float32 | bfloat16, of a model directory (default: %(default)s)"
    )
    fit.add_argument("--key", default="TP1_PP1", help="entry to write (default: %(default)s)")
    fit.add_argument("--threads", type=_at_least_one, default=1, help="compute threads (default: %(default)s)")
    fit.add_argument("--repeats", type=_at_least_one, default=15, help="visits of each point (default: %(default)s)")
    fit.add_argument("--steps", type=_at_least_one, default=8, help="timed steps a visit (default: %(default)s)")
    fit.add_argument("--hold-out", type=float, default=0.25, help="share of points to test on (default: %(default)s)")
    fit.add_argument("--clock", choices=(CPU, WALL), help="default: cpu with one thread, else wall")
    fit.add_argument("--seed", type=int, default=0, help="of the visiting order and the held-out points")
    fit.add_argument("--plot", type=Path, help="picture, svg or png (default: beside the JSON file)")
    show = commands.add_parser("show", help="print and plot a cost model at given batch sizes")
    show.add_argument("name", help=f"JSON file, or a shipped name: {', '.join(shipped_cost_models())}")
    show.add_argument("--key", help="entry to show (default: the first)")
    show.add_argument("--plot", type=Path, help="picture to write, svg or png")
    for command in (fit, show):
        command.add_argument("--num-seqs", type=_at_least_one, nargs="+", default=NUMS_SEQS, help="sequences in a step")
        command.add_argument(
            "--tokens-per-seq", type=_at_least_one, nargs="+", default=TOKENS_PER_SEQ,
            help="KV tokens of each sequence; a grid point has sequences x this many",
        )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
