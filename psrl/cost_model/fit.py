"""The five coefficients from measured steps. Pure: numbers in, numbers out.

A step takes max(T, B + K n) + A kv seconds: memory-bound and flat for small batches, compute-bound and linear in the number
of sequences for large ones, plus attention over the KV tokens. Once it is known which batch sizes are in which regime, this
is linear in the coefficients. There are only as many ways to part the measured batch sizes as there are sizes, so all of
them are tried, and the best one is the best there is: no starting point, no local minimum.

A constant cost of attention cannot be told from a constant cost of the rest by watching whole steps (only T + attn_b and
B + attn_b ever appear), so attn_latency_b is 0 here and its share is within other_threshold and other_latency_b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from psrl.protocol.cost_model import CostModel

ROBUST_SCALE = 0.03
"""Relative error from which a point counts by its distance rather than by the square of it."""
_ROUNDS = 30
_MIN_POINTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A measured decode step of `num_seqs` sequences over `kv_tokens` KV tokens."""

    num_seqs: int
    kv_tokens: float
    latency_s: float


class FitError(ValueError):
    """The measured points cannot determine the coefficients; one sentence."""


def fit_cost_model(points: Sequence[StepTime]) -> CostModel:
    """Non-negative coefficients with the least soft-L1 loss of the relative errors.

    Relative, because routing compares gains of small and of large batches; soft-L1, because on a shared machine a few
    points are far off. Raises FitError for fewer than four points, a single batch size or a single ratio of KV tokens.
    """
    _check(points)
    sizes = sorted({p.num_seqs for p in points})
    splits = [-math.inf, *sizes]  # sequences up to the split are in the flat regime
    candidates = [_fit_parted(points, split) for split in splits]
    return min(candidates, key=lambda model: robust_loss(model, points))


def relative_errors(model: CostModel, points: Sequence[StepTime]) -> list[float]:
    """(predicted - measured) / measured of each point."""
    return [model.latency_s(p.num_seqs, p.kv_tokens) / p.latency_s - 1.0 for p in points]


def robust_loss(model: CostModel, points: Sequence[StepTime]) -> float:
    errors = np.array(relative_errors(model, points)) / ROBUST_SCALE
    return float(np.sum(np.sqrt(1.0 + errors**2) - 1.0))


def hold_out(num_points: int, share: float, rng: np.random.Generator) -> set[int]:
    """Indices of the points that the fit does not see: `share` of them, rounded, drawn at random."""
    return set(rng.permutation(num_points)[: round(share * num_points)].tolist())


def _check(points: Sequence[StepTime]) -> None:
    bad = next((p for p in points if not (0 < p.latency_s < math.inf and p.num_seqs > 0 and p.kv_tokens >= 0)), None)
    if bad is not None:
        raise FitError(
            f"A step of {bad.latency_s} s with {bad.num_seqs} sequences cannot be fitted: both must be above 0."
        )
    if len(points) < _MIN_POINTS:
        raise FitError(f"{len(points)} points are too few for a fit: measure at least {_MIN_POINTS}.")
    if len({p.num_seqs for p in points}) < 2:
        raise FitError("All points have the same number of sequences: measure at least two numbers.")
    if len({p.kv_tokens / p.num_seqs for p in points}) < 2:
        raise FitError("All points have the same KV tokens a sequence: measure at least two lengths.")


def _fit_parted(points: Sequence[StepTime], split: float) -> CostModel:
    """Best coefficients if exactly the batches of at most `split` sequences are in the flat regime."""
    n = np.array([p.num_seqs for p in points], dtype=float)
    measured = np.array([p.latency_s for p in points])
    flat = n <= split
    columns = np.stack([flat, ~flat, np.where(flat, 0.0, n), [p.kv_tokens for p in points]], axis=1).astype(float)
    t, b, k, a = _robust_non_negative(columns / measured[:, None])
    if flat.all():
        b, k = t, 0.0
    if not flat.any():
        t = b + k * n.min()
    return CostModel(other_threshold=t, other_latency_b=b, other_latency_k=k, attn_latency_b=0.0, attn_latency_k=a)


def _robust_non_negative(rows: np.ndarray) -> list[float]:
    """x >= 0 with `rows @ x` near 1 by the soft-L1 loss: least squares again and again, far points weighing less."""
    weights = np.ones(len(rows))
    x = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        before, x = x, _non_negative_least_squares(rows * weights[:, None], weights)
        weights = (1.0 + ((rows @ x - 1.0) / ROBUST_SCALE) ** 2) ** -0.25
        if np.allclose(x, before, rtol=1e-9, atol=0.0):
            break
    return [float(value) for value in x]


def _non_negative_least_squares(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The solution is an ordinary least-squares solution on some subset of the columns; with four columns all subsets are
    quickly tried."""
    scale = np.maximum(np.abs(a).max(axis=0), 1e-300)
    a = a / scale
    best, least = np.zeros(a.shape[1]), float(y @ y)
    for size in range(1, a.shape[1] + 1):
        for chosen in combinations(range(a.shape[1]), size):
            part = a[:, chosen]
            x = np.linalg.lstsq(part, y, rcond=None)[0]
            loss = float(np.sum((part @ x - y) ** 2))
            if loss < least and (x >= 0).all():
                best, least = np.zeros(a.shape[1]), loss
                best[list(chosen)] = x
    return best / scale
