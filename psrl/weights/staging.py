"""The reader's arrival buffer, on the device of the engine's weights, and what was handed out of it last."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.protocol.weights import ShardLayout
from psrl.weights.channel.base import PullError, StagedWeights
from psrl.weights.checksum import checksum
from psrl.weights.memory import flat_buffer
from psrl.weights.plan import Place, PullPlan, Specs, plan_pull, same_place


class Staging:
    """One flat buffer, planned for the layouts of the ranks that publish now."""

    def __init__(self, expected: Specs, place: Place = same_place, device: torch.device | str = "cpu") -> None:
        self._expected = dict(expected)
        self._place = place
        self.device = torch.device(device)
        self._layouts: tuple[ShardLayout, ...] = ()
        self._plan: PullPlan | None = None
        self._handed_out: StagedWeights | None = None
        self.buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def plan(self) -> PullPlan:
        if self._plan is None:
            raise RuntimeError("staging was used before prepare()")
        return self._plan

    def discard(self) -> None:
        """The buffer is about to be written: what was handed out of it is not valid any more."""
        if self._handed_out is not None:
            self._handed_out.valid = False
            self._handed_out = None

    def prepare(self, layouts: Sequence[ShardLayout]) -> bool:
        """Plan for these layouts; True if the buffer was made anew. PullError (not retryable) if they do not fit."""
        if tuple(layouts) == self._layouts:
            return False
        try:
            plan = plan_pull(layouts, self._expected, self._place)
        except ValueError as error:
            raise PullError(str(error), retryable=False) from error
        self._layouts, self._plan = tuple(layouts), plan
        if self.buffer.numel() == plan.nbytes:
            return False
        self.buffer = flat_buffer(plan.nbytes, self.device)
        return True

    def replace(self) -> torch.Tensor:
        """Take a fresh buffer of the same size; returns the old one, which something may still write into."""
        old, self.buffer = self.buffer, flat_buffer(self.buffer.numel(), self.device)
        return old

    def intact(self, rank: int, checksums: Sequence[int]) -> bool:
        """Whether what has arrived from `rank` is what it published; `checksums` are those of all its sections."""
        return all(
            checksum(self.buffer[read.target : read.target + read.nbytes]) == checksums[read.section]
            for read in self.plan.reads[rank]
        )

    def hand_out(self, version: int, incarnation: int, transport: str) -> StagedWeights:
        """The buffer holds this version, whole and checked."""
        self._handed_out = StagedWeights(version, incarnation, self.plan, self.buffer, transport)
        return self._handed_out
