"""Fits a simulation to a real run, from what its run directory holds: `python -m psrl.simulate calibrate RUN_DIR`.

Decoding comes from the engine's own counters, which each switch to new weights notes in the timeline, as long as it is
linear in steps, sequences and tokens held; training from the metrics; the rest from spans. What lies between the roles
(reward, dispatch) can be told only by a synchronous run, where nothing hides it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from psrl.config.errors import ConfigError
from psrl.coordinator.ledger import replay
from psrl.coordinator.records import Occupy
from psrl.protocol.cost_model import CostModel
from psrl.rundir.publish import write_atomic
from psrl.telemetry.metrics import Row, number, read_metrics
from psrl.telemetry.record import configuration
from psrl.telemetry.timeline import BUSY, CHECKPOINT, PULL, PUSH, SWITCH, WAIT, Span
from psrl.telemetry.timeline_read import by_name, read_timeline

WARMUP_STEPS = 3
"""First steps that are left out: caches fill, threads start."""
LEAST_POINTS = 5
FEATURES = ("decode_steps", "generated_tokens", "decode_kv_tokens")
LEAST_SPREAD = 0.3
"""Prefills of one size only (by standard deviation over mean) do not tell the cost of a token from that of a prefill."""
FILE_NAME = "calibration.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What one run says. `costs` has names of `simulation.costs`; lengths are those of the responses of each group."""

    decode: CostModel
    costs: dict[str, float]
    prompt_tokens: int
    lengths: list[list[int]]
    errors: dict[str, float]
    """Median error of each fit, as a share of what was measured."""

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n")


def load_calibration(path: Path) -> Calibration:
    """Raises ConfigError for a file that is missing or none of these."""
    try:
        content = json.loads(path.expanduser().read_text())
        return Calibration(**(content | {"decode": CostModel(**content["decode"])}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"simulation.calibration={path} is not a calibration ({error}): write one with `python -m psrl.simulate calibrate RUN_DIR`."
        ) from error


def calibrate(run_dir: Path) -> Calibration:
    """Raises ConfigError if the run is too short or has no timeline."""
    tracks, rows = read_timeline(run_dir / "timeline"), read_metrics(run_dir / "metrics.jsonl")[WARMUP_STEPS:]
    instances = by_name(tracks, "instance")
    trainers = by_name(tracks, "trainer")
    if len(rows) < LEAST_POINTS or not instances or not trainers:
        raise ConfigError(
            f"{run_dir} cannot be calibrated from: it has {len(rows)} steps after {WARMUP_STEPS} of warm-up and {len(instances)} instance "
            f"timelines, where at least {LEAST_POINTS} steps and one instance are needed."
        )
    spans = [span for own in instances.values() for span in own]
    decode, decode_error = fit_decode(spans)
    prefill_s, prefill_s_per_token = fit_prefill(spans, decode.other_latency_k)
    train_s, per_token, train_error = fit_training(rows)
    costs = {
        "step_overhead_s": step_overhead(spans),
        "prefill_s": prefill_s,
        "prefill_s_per_token": prefill_s_per_token,
        "train_s": train_s,
        "train_s_per_token": per_token,
        "push_s": _mean(rows, "timing_s/push_weights"),
        "pull_s": _mean_span(spans, PULL),
        "switch_s": _mean_span(spans, SWITCH),
        "checkpoint_s": _mean_span([s for own in trainers.values() for s in own], CHECKPOINT),
    }
    config, _ = configuration(run_dir / "config.yaml")
    if config.get("psrl.staleness") == 0:
        first = min(trainers)
        costs |= between_roles(trainers[first], spans, costs["pull_s"] + costs["switch_s"])
    lengths, prompt_tokens = trained_lengths(run_dir)
    errors = {"decode": decode_error, "train": train_error}
    return Calibration(decode=decode, costs=costs, prompt_tokens=prompt_tokens, lengths=lengths, errors=errors)


# ---- fits ----------------------------------------------------------------------------------------------------


def fit_decode(spans: Sequence[Span]) -> tuple[CostModel, float]:
    """(cost model, median relative error), by least squares of relative errors on what was decoded between two switches:
    seconds = b steps + k (sequences, summed over steps) + a (tokens held, summed over steps)."""
    work = _work(spans)
    if len(work) < LEAST_POINTS:
        raise ConfigError(
            f"The timeline notes the engine's work only {len(work)} times, where at least {LEAST_POINTS} are needed: train more steps."
        )
    seconds = np.array([w["busy_s"] - w["prefill_s"] for w in work])
    columns = np.array([[w[name] for name in FEATURES] for w in work], dtype=float)
    (step, sequence, held), error = _fit(columns, seconds)
    if step + sequence <= 0:
        raise ConfigError(
            "The engine's busy time does not depend on its decode steps: the run is too short or too uneven."
        )
    model = CostModel(
        other_threshold=0.0,
        other_latency_b=step,
        other_latency_k=sequence,
        attn_latency_b=0.0,
        attn_latency_k=held,
    )
    return model, error


def fit_prefill(spans: Sequence[Span], decode_s_per_sequence: float) -> tuple[float, float]:
    """(seconds a prefill, seconds a token of it). Where all prefills are alike a token counts as much as a sequence of a
    decode step, for which the same is computed, and the rest is the prefill's own."""
    work = [w for w in _work(spans) if w["prefills"] and w["prompt_tokens"]]
    if not work:
        return 0.0, decode_s_per_sequence
    sizes = np.array([w["prompt_tokens"] / w["prefills"] for w in work])
    if sizes.std() >= LEAST_SPREAD * sizes.mean():
        columns = np.array([[w["prefills"], w["prompt_tokens"]] for w in work], dtype=float)
        (each, per_token), _ = _fit(columns, np.array([w["prefill_s"] for w in work]))
        return each, per_token
    rest = sum(w["prefill_s"] for w in work) - decode_s_per_sequence * sum(w["prompt_tokens"] for w in work)
    return max(0.0, rest) / sum(w["prefills"] for w in work), decode_s_per_sequence


def _work(spans: Sequence[Span]) -> list[dict[str, Any]]:
    return [s.attributes for s in spans if s.name == SWITCH and s.attributes.get("decode_steps", 0) > 0]


def fit_training(rows: Sequence[Row]) -> tuple[float, float, float]:
    """(seconds a step, seconds a token, median relative error) of everything in a step but waiting, publishing and
    checkpoints."""
    parts = ("timing_s/wait_buffer", "timing_s/push_weights", "timing_s/save_checkpoint")
    seconds = np.array([row["timing_s/step"] - sum(number(row, part) or 0.0 for part in parts) for row in rows])
    columns = np.array([[1.0, row["perf/total_num_tokens"]] for row in rows])
    (constant, per_token), error = _fit(columns, seconds)
    return constant, per_token, error


def _fit(columns: np.ndarray, values: np.ndarray) -> tuple[list[float], float]:
    """Coefficients >= 0 that make the relative errors small, and the median of these. Points far off the first fit (a
    stall of the machine) are left out of the second."""
    keep = np.ones(len(values), dtype=bool)
    for _ in range(2):
        weighted = columns[keep] / values[keep, None]
        coefficients = non_negative(weighted, np.ones(keep.sum()))
        off = np.abs(columns @ coefficients / values - 1)
        keep = off <= max(4 * float(np.median(off)), 1e-9)
    return [float(x) for x in coefficients], float(np.median(off))


def non_negative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares with coefficients >= 0: the best of all sets of columns whose own solution has none below 0.
    Exact, and cheap for the few columns here."""
    count = columns.shape[1]
    best, best_error = np.zeros(count), float("inf")
    for chosen in range(1, 2**count):
        used = [i for i in range(count) if chosen >> i & 1]
        solution, *_ = np.linalg.lstsq(columns[:, used], values, rcond=None)
        error = float(np.sum((columns[:, used] @ solution - values) ** 2))
        if (solution >= 0).all() and error < best_error * (1 - 1e-9):
            best, best_error = np.zeros(count), error
            best[used] = solution
    return best


def step_overhead(spans: Sequence[Span]) -> float:
    """Seconds between two decode steps of an instance that is at work."""
    steps = sum(s.attributes.get("decode_steps", 0) for s in spans if s.name == SWITCH)
    between = [
        s.end_s - s.start_s - s.seconds for s in spans if s.name == BUSY and s.seconds > 0.5 * (s.end_s - s.start_s)
    ]
    return sum(between) / steps if steps else 0.0


def between_roles(trainer: Sequence[Span], instances: Sequence[Span], pull_and_switch_s: float) -> dict[str, float]:
    """Of a synchronous run: reward_s, from the last decoded token to the trainer's buffer, and dispatch_s, from
    publication to the first token's step less what pulling takes."""
    begins = np.array(sorted(s.start_s for s in instances if s.name == BUSY))
    ends = np.array(sorted(s.end_s for s in instances if s.name == BUSY))
    got = [s.end_s for s in trainer if s.name == WAIT][WARMUP_STEPS:]
    published = [s.end_s for s in trainer if s.name == PUSH][WARMUP_STEPS:]
    rewards = [t - ends[i - 1] for t in got if (i := int(np.searchsorted(ends, t)))]
    starts = [begins[i] - t for t in published if (i := int(np.searchsorted(begins, t))) < len(begins)]
    return {
        "reward_s": float(median(rewards)) if rewards else 0.0,
        "dispatch_s": max(0.0, float(median(starts)) - pull_and_switch_s) if starts else 0.0,
    }


def trained_lengths(run_dir: Path) -> tuple[list[list[int]], int]:
    """Response tokens of every finished group's samples, from the ledger, and the mean prompt."""
    groups, prompts = [], []
    for record in replay(run_dir / "ledger"):
        if isinstance(record, Occupy):
            lengths = [tokens - record.ref.prompt_tokens for tokens in record.ref.tokens if tokens]
            if lengths:
                groups.append(lengths)
                prompts.append(record.ref.prompt_tokens)
    if not groups:
        raise ConfigError(f"{run_dir} has no finished group in its ledger: there is nothing to learn lengths from.")
    return groups, max(1, round(fmean(prompts)))


def _mean(rows: Sequence[Row], key: str) -> float:
    values = [value for row in rows if (value := number(row, key)) is not None]
    return fmean(values) if values else 0.0


def _mean_span(spans: Sequence[Span], name: str) -> float:
    values = [span.seconds for span in spans if span.name == name]
    return fmean(values) if values else 0.0


# ---- command line --------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m psrl.simulate calibrate", description="Fit a simulation to a run.")
    parser.add_argument("run_dir", type=Path, help="of a run, best one with psrl.staleness=0 and at least 30 steps")
    parser.add_argument("-o", "--output", type=Path, help=f"default: {FILE_NAME} in the run directory")
    args = parser.parse_args(argv)
    if not args.run_dir.is_dir():
        raise ConfigError(f"There is no run directory at {args.run_dir}.")
    found = calibrate(args.run_dir)
    path = args.output or args.run_dir / FILE_NAME
    found.save(path)
    print("\n".join(describe(found)))
    print(f"simulation.calibration={path}")
    return 0


def describe(found: Calibration) -> list[str]:
    d: Any = found.decode
    lines = [
        f"decode step: {d.other_latency_b * 1e3:.4g} ms + {d.other_latency_k * 1e6:.4g} us a sequence + "
        f"{d.attn_latency_k * 1e9:.4g} ns a token held (median error {found.errors['decode']:.1%})",
        f"training: median error {found.errors['train']:.1%}",
    ]
    lines += [f"{name}: {value:.4g}" for name, value in found.costs.items()]
    if "reward_s" not in found.costs:
        lines.append("reward_s and dispatch_s are not known: only a run with psrl.staleness=0 shows them.")
    lengths = [length for group in found.lengths for length in group]
    return [
        *lines,
        f"{len(found.lengths)} groups, mean response {fmean(lengths):.1f} tokens, prompt {found.prompt_tokens}",
    ]
