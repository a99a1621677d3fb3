"""What `fit` and `show` print: measured against predicted, and how good the prediction is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psrl.cost_model.fit import StepTime, relative_errors
from psrl.cost_model.measure import Measurement
from psrl.protocol.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Absolute relative errors of some points: median, 90th percentile, largest."""

    num_points: int
    median: float
    p90: float
    largest: float

    def __str__(self) -> str:
        return f"median {self.median:.1%}, 90th percentile {self.p90:.1%}, largest {self.largest:.1%} ({self.num_points} points)"


def summarize(model: CostModel, points: Sequence[StepTime]) -> ErrorSummary:
    errors = np.abs(relative_errors(model, points))
    return ErrorSummary(len(errors), float(np.median(errors)), float(np.quantile(errors, 0.9)), float(errors.max()))


def fit_lines(
    model: CostModel, measurements: Sequence[Measurement], points: Sequence[StepTime], held_out: set[int]
) -> list[str]:
    """A line a grid point; `points` are the measurements by the clock that the fit went by."""
    lines = [f"{'seqs':>5} {'KV tokens':>10} {'CPU ms':>9} {'wall ms':>9} {'model ms':>9} {'error':>7}"]
    errors = relative_errors(model, points)
    for index, (m, point, error) in enumerate(zip(measurements, points, errors, strict=True)):
        predicted = model.latency_s(point.num_seqs, point.kv_tokens)
        lines.append(
            f"{point.num_seqs:>5} {point.kv_tokens:>10.0f} {m.cpu_s * 1e3:>9.3f} {m.wall_s * 1e3:>9.3f} "
            f"{predicted * 1e3:>9.3f} {error:>+7.1%}{'  held out' if index in held_out else ''}"
        )
    return lines


def show_lines(model: CostModel, nums_seqs: Sequence[int], tokens_per_seq: Sequence[int]) -> list[str]:
    """Latency and throughput of each combination."""
    lines = [f"{'seqs':>5} {'KV tokens':>10} {'step ms':>10} {'tokens/s':>10}"]
    for n in nums_seqs:
        for tokens in tokens_per_seq:
            kv = n * tokens
            lines.append(f"{n:>5} {kv:>10} {model.latency_s(n, kv) * 1e3:>10.3f} {model.throughput(n, kv):>10.1f}")
    return lines


def coefficient_line(model: CostModel) -> str:
    return (
        f"step [s] = max({model.other_threshold:.6g}, {model.other_latency_b:.6g} + {model.other_latency_k:.6g} n) "
        f"+ {model.attn_latency_b:.6g} + {model.attn_latency_k:.6g} kv_tokens"
    )
