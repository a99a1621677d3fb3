"""Which sample each token of a micro-batch belongs to: sums over a sample's tokens, and back.

A row may hold several samples behind one prompt, so a row is not a sample. A sample is never split over rows, hence
never over micro-batches or ranks: what is computed per sample needs no communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sequences:
    """`ids` int64 [rows, length]: the sample of each response token in [0, count), -1 for prompts and padding.

    Vectors over samples have `count` elements, those of other micro-batches included (0 there).
    """

    ids: torch.Tensor
    count: int

    @classmethod
    def of_rows(cls, mask: torch.Tensor) -> Sequences:
        """Each row of `mask` [rows, length] is one sample."""
        rows = torch.arange(mask.shape[0], device=mask.device)[:, None]
        return cls(torch.where(mask, rows, -1), mask.shape[0])

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` [rows, length] over each sample's tokens: [count]. A bool grid counts its tokens."""
        values = values.long() if values.dtype == torch.bool else values
        totals = values.new_zeros(self.count + 1).scatter_add(0, self._slots(), values.flatten())
        return totals[1:]

    def max(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Largest of `values` [rows, length] among each sample's tokens in `mask`: [count], 0 for a sample without one."""
        lowest = torch.where(mask, values, values.new_full((), -torch.inf)).flatten()
        largest = values.new_full((self.count + 1,), -torch.inf).scatter_reduce(0, self._slots(), lowest, "amax")[1:]
        return torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)

    def spread(self, per_sample: torch.Tensor) -> torch.Tensor:
        """[count] -> [rows, length]: each token gets its sample's value, prompts and padding 0 (False)."""
        return torch.cat([per_sample.new_zeros(1), per_sample])[self.ids + 1]

    def _slots(self) -> torch.Tensor:
        return (self.ids + 1).flatten()
