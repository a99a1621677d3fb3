"""Learning rate as a function of the optimizer step."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    kind: str = "constant",
    total_steps: int | None = None,
    min_ratio: float = 0.0,
) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up to `peak`, then constant, or a cosine down to
    min_ratio x peak at `total_steps` (SGDR without restarts, Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5).

    Step k of the warm-up of w steps has peak x (k + 1) / w, so that no step is wasted at rate 0. Beyond `total_steps`
    the rate stays at its minimum; without `total_steps` it stays at the peak.

    `learning_rate(0, peak=1.0, warmup_steps=4) == 0.25`
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if kind == "constant" or total_steps is None:
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
