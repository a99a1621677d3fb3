"""Reads by route "shm": plain copies out of a trainer's segment that this process maps, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.host_memory import register_host, unregister_host
from psrl.protocol.weights import SharedSlot
from psrl.weights.channel.slot_header import HEADER_BYTES, SlotHeader, read_header
from psrl.weights.memory import map_shared
from psrl.weights.plan import Read, windows


class SegmentError(OSError):
    """A segment cannot be mapped: its owner is gone, or in a container into which this process cannot look."""


class MappedReads:
    """The segments that are mapped, at most one of each trainer rank; registered with CUDA if copies go to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._registers = device.type == "cuda"
        self._mapped: dict[int, tuple[bytes, torch.Tensor]] = {}

    def slot(self, rank: int, shared: SharedSlot, nbytes: int) -> torch.Tensor:
        """The slot of `rank`: header and payload. SegmentError if its segment cannot be mapped."""
        token, segment = self._mapped.get(rank, (b"", torch.empty(0)))
        if token != shared.token:
            self._unmap(rank)
            try:
                segment = map_shared(shared)
            except OSError as error:
                raise SegmentError(f"the segment of trainer rank {rank} cannot be mapped: {error}") from error
            if self._registers:
                register_host(segment)
            self._mapped[rank] = shared.token, segment
        if shared.offset + nbytes > segment.numel():
            raise SegmentError(f"the segment of trainer rank {rank} ends before its slot does")
        return segment[shared.offset : shared.offset + nbytes]

    def close(self) -> None:
        for rank in tuple(self._mapped):
            self._unmap(rank)

    def _unmap(self, rank: int) -> None:
        if rank in self._mapped:
            _, segment = self._mapped.pop(rank)
            if self._registers:
                unregister_host(segment)


class MappedRead:
    """One rank's sections into the arrival buffer, a window at each `advance`."""

    def __init__(self, slot: torch.Tensor, reads: Sequence[Read], into: torch.Tensor, window_bytes: int) -> None:
        self._slot, self._into = slot, into
        self._windows = [
            (HEADER_BYTES + read.source + offset, read.target + offset, nbytes)
            for read in reads
            for offset, nbytes in windows(read.nbytes, window_bytes)
        ]
        self.header: SlotHeader | None = None
        """What stood before the payload after it was read; None before, or if that was no header."""
        self.done = False

    def advance(self) -> int:
        """Bytes that have arrived by this call."""
        if not self._windows:
            self.header, self.done = read_header(self._slot), True
            return HEADER_BYTES
        source, target, nbytes = self._windows.pop(0)
        self._into[target : target + nbytes].copy_(self._slot[source : source + nbytes], non_blocking=True)
        if self._into.is_cuda:
            torch.cuda.current_stream(self._into.device).synchronize()
        return nbytes
