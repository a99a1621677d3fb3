"""Mean 0 and variance 1 over all trainable tokens of a buffer, whatever micro-batches and ranks hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.algorithms.advantages.base import RewardedBatch
from psrl.algorithms.metrics import AllSum
from psrl.algorithms.tensors import masked

VARIANCE_EPS = 1e-8
"""Under the root, so that equal values give 0 instead of 0 / 0."""


def whiten(grids: Sequence[torch.Tensor], batches: Sequence[RewardedBatch], all_sum: AllSum) -> list[torch.Tensor]:
    """(x - mean) / sqrt(var + 1e-8) over the masks of all micro-batches and ranks, var with n - 1; 0 outside the masks.

    Two passes: the mean first, so that the variance does not suffer from cancellation. Equal values give exactly 0 up to
    rounding of the mean; a single token gives 0.
    """
    masks = [batch.loss_mask for batch in batches]
    count, total = all_sum(
        [
            float(sum(int(mask.sum()) for mask in masks)),
            sum(float(masked(grid.double(), mask).sum()) for grid, mask in zip(grids, masks, strict=True)),
        ]
    )
    mean = total / max(count, 1.0)
    centred = [masked(grid.double() - mean, mask) for grid, mask in zip(grids, masks, strict=True)]
    (squares,) = all_sum([sum(float(grid.square().sum()) for grid in centred)])
    scale = (squares / max(count - 1.0, 1.0) + VARIANCE_EPS) ** -0.5
    return [grid * scale for grid in centred]
