"""Partial metrics: what a micro-batch hands over so that every split over micro-batches and ranks gives one answer.

A partial result is a dict of numbers. Names that end in `_min` or `_max` combine by minimum and maximum, all others
by addition; means and ratios are formed once, at the very end, by the `finalise` functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

MetricSums = dict[str, torch.Tensor]
AllSum = Callable[[Sequence[float]], list[float]]
"""Each value added over all ranks."""


def combine(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine partial results of the same or of different names.

    `combine([{"n": 1, "w_max": 3}, {"n": 2, "w_max": 2}]) == {"n": 3, "w_max": 3}`.
    """
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif name.endswith("_min"):
                total[name] = min(total[name], value)
            elif name.endswith("_max"):
                total[name] = max(total[name], value)
            else:
                total[name] += value
    return total


def stack(parts: Sequence[MetricSums]) -> tuple[list[str], torch.Tensor, list[str], torch.Tensor]:
    """Combine micro-batches on the device, in the two forms that a collective can reduce.

    Returns (names, float64 vector to add over ranks, names, float64 vector to maximise over ranks); minima come
    negated in the second one. All parts must have the same names. Nothing is copied to the host.
    """
    added = [name for name in parts[0] if not name.endswith(("_min", "_max"))]
    extreme = [name for name in parts[0] if name.endswith(("_min", "_max"))]
    sums = torch.stack([torch.stack([part[name].double() for name in added]) for part in parts]).sum(0)
    if not extreme:
        return added, sums, [], sums.new_zeros(0)
    signs = sums.new_tensor([-1.0 if name.endswith("_min") else 1.0 for name in extreme])
    values = torch.stack([torch.stack([part[name].double() for name in extreme]) for part in parts])
    return added, sums, extreme, (values * signs).amax(0)


def unstack(added: list[str], sums: torch.Tensor, extreme: list[str], maxima: torch.Tensor) -> dict[str, float]:
    """The inverse of `stack` after the reduction: plain floats by name, minima with their sign restored."""
    result = dict(zip(added, sums.tolist(), strict=True))
    for name, value in zip(extreme, maxima.tolist(), strict=True):
        result[name] = -value if name.endswith("_min") else value
    return result
