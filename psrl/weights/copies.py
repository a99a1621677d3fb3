"""Out of the arrival buffer into the engine's own tensors: the copies of a switch, worked out once and made many times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from psrl.weights.plan import PlannedTensor, PullPlan

LARGE_BYTES = 16 * 2**20
"""A copy that is worth a launch of its own: a fused kernel reached two thirds of the rate of a plain copy within a GPU."""


class Copies:
    """The moves of `plan` between `buffer` and `tensors`. Working them out costs more than a whole small model's copy on a
    GPU, and neither changes from version to version."""

    def __init__(self, plan: PullPlan, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        self.plan, self.buffer = plan, buffer
        groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        self._large: list[tuple[torch.Tensor, torch.Tensor]] = []
        for planned in plan.tensors:
            for target, source in views(planned, buffer, tensors[planned.name]):
                flat = target.is_contiguous() and source.is_contiguous()
                if flat and target.nbytes >= LARGE_BYTES:
                    self._large.append((target, source))
                    continue
                # One pair that is strided or of another dtype would take all the others off the fused kernel.
                targets, sources = groups[planned.dtype, flat]
                targets.append(target)
                sources.append(source)
        self._groups = tuple(groups.values())

    def run(self) -> None:
        """Make them, the small ones a few kernels; rows that nothing is published for stay as they are. Does not wait for a GPU."""
        for target, source in self._large:
            target.copy_(source, non_blocking=True)
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources)


def views(planned: PlannedTensor, buffer: torch.Tensor, into: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(where a move belongs in `into`, what has arrived of it), both [rows, columns] or flat if both are contiguous."""
    if not planned.moves:
        return []
    arrived = buffer.view(planned.dtype)
    matrix = into.detach().view(into.shape[0] if into.dim() else 1, -1)
    found = []
    for move in planned.moves:
        target = matrix[move.row : move.row + move.rows, move.column : move.column + move.columns]
        offset = move.source // planned.dtype.itemsize
        source = arrived.as_strided((move.rows, move.columns), (move.stride, 1), offset)
        flat = target.is_contiguous() and source.is_contiguous()
        found.append((target.view(-1), source.view(-1)) if flat else (target, source))
    return found
