"""Reads by NIXL: one agent, the registered memory that its reads land in, and what became of them.

A read cannot be called back and its bytes may arrive at any time, so one that is given up keeps its memory until it has
ended; the next pull lands elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from psrl.protocol.weights import ReadGranted
from psrl.weights.channel.nixl_agent import Read as Transfer
from psrl.weights.channel.nixl_agent import TransferAgent, TransferError
from psrl.weights.channel.nixl_source import Source
from psrl.weights.channel.slot_header import HEADER_BYTES, SlotHeader, read_header
from psrl.weights.plan import windows

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Memory:
    """Registered memory that reads write into. It is let go of only when none of them is under way any more."""

    buffer: torch.Tensor
    headers: torch.Tensor
    registrations: list[Any]
    unfinished: list[Transfer] = field(default_factory=list)


class NixlReads:
    """The reads of one puller into one kind of memory, `window_bytes` at a time."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._memory: _Memory | None = None
        self._stuck: list[_Memory] = []
        self._agent = TransferAgent(f"weights-reader-{secrets.token_hex(6)}")

    @property
    def hanging(self) -> int:
        """Given-up reads whose memory may still be written to."""
        return len(self._stuck)

    def land_in(self, buffer: torch.Tensor, num_ranks: int) -> None:
        """Reads of these ranks land in `buffer` from now on; registers what is new."""
        memory, header_bytes = self._memory, HEADER_BYTES * num_ranks
        if memory is not None and memory.buffer is buffer and memory.headers.numel() == header_bytes:
            return
        self._release()
        headers = torch.zeros(header_bytes, dtype=torch.uint8, device=buffer.device)
        registered = [self._agent.register(each) for each in (buffer, headers) if each.nbytes]
        self._memory = _Memory(buffer, headers, registered)

    def begin(
        self,
        source: Source,
        grant: ReadGranted,
        rank: int,
        moves: Sequence[tuple[int, torch.Tensor]],
        believed: SlotHeader | None = None,
    ) -> NixlRead:
        """Read from bytes of the payload of `rank` that was granted into parts of the buffer; starts with the first `advance`.
        Meets the source's agent if it is new. A header that is `believed` is not read: checksums of what arrives say as much, and
        it would be a transfer of its own."""
        assert self._memory is not None
        if grant.metadata:
            self.part(source)
            source.met, source.lost = self._agent.add_peer(grant.metadata), False
        header = self._memory.headers[rank * HEADER_BYTES :][:HEADER_BYTES]
        cut = [
            (grant.address + HEADER_BYTES + start + offset, into[offset : offset + nbytes])
            for start, into in moves
            for offset, nbytes in windows(into.nbytes, self._window_bytes)
        ]
        if believed is None:
            cut.append((grant.address, header))
        return NixlRead(self._agent, source, grant.device, cut, header, believed)

    def abandon(self, unfinished: list[Transfer]) -> bool:
        """Leave these reads the memory; True if there were any, and then the buffer belongs to them."""
        if not unfinished or self._memory is None:
            return False
        self._memory.unfinished = unfinished
        self._stuck.append(self._memory)
        self._memory = None
        return True

    def free_stuck(self) -> None:
        for memory in self._stuck:
            memory.unfinished = [read for read in memory.unfinished if not _over(read)]
            if not memory.unfinished:
                self._deregister(memory)
        self._stuck = [memory for memory in self._stuck if memory.unfinished]

    def part(self, source: Source) -> None:
        """Forget a publisher whose agent is gone."""
        if source.met and not self._stuck:  # a connection on which reads hang is left alone
            with contextlib.suppress(TransferError):  # it may have been dropped already
                self._agent.remove_peer(source.met)
        source.met = ""

    def close(self) -> None:
        self.free_stuck()
        if self._stuck:
            self._agent.outlive_process(each for memory in self._stuck for each in (memory.buffer, memory.headers))
            log.warning(
                "%d reads still hang at a trainer rank: their buffers stay until this process ends", len(self._stuck)
            )
        else:
            self._release()

    def _release(self) -> None:
        if self._memory is not None:
            self._deregister(self._memory)
            self._memory = None

    def _deregister(self, memory: _Memory) -> None:
        for registration in memory.registrations:
            self._agent.deregister(registration)


class NixlRead:
    """What is read from one rank, a window at each `advance`, its header last if it is not believed."""

    def __init__(
        self,
        agent: TransferAgent,
        source: Source,
        device: int,
        moves: Sequence[tuple[int, torch.Tensor]],
        header: torch.Tensor,
        believed: SlotHeader | None,
    ) -> None:
        self._agent, self._source, self._device = agent, source, device
        self._moves, self._header, self._believed = list(moves), header, believed
        self.transfer: Transfer | None = None
        """The read that is under way."""

    @property
    def done(self) -> bool:
        return not self._moves

    @property
    def header(self) -> SlotHeader | None:
        """What stood before the payload after it was read, as far as is known."""
        return self._believed or read_header(self._header)

    def advance(self) -> int:
        """Post or follow the window; bytes that have arrived with it if it is done. TransferError if it failed, and then the
        publisher must be met anew."""
        address, into = self._moves[0]
        try:
            if self.transfer is None:
                self.transfer = self._agent.read(self._source.met, into, address, self._device)
            if not self.transfer.done():
                return 0
            self.transfer.end()
        except TransferError as error:
            self.transfer, self._source.lost = None, True
            raise TransferError(f"{self._source.name}: {error}") from error
        self.transfer = None
        self._moves.pop(0)
        return into.nbytes


def _over(read: Transfer) -> bool:
    try:
        if not read.done():
            return False
    except TransferError:
        pass  # failed: nothing arrives any more
    with contextlib.suppress(TransferError):
        read.end()
    return True
