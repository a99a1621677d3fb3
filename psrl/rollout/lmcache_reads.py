"""Reads of another worker's chunks into this one's tier. One that is given up goes on: its memory is freed once it has ended.

A read that was posted cannot be taken back: its bytes may still arrive, and must find nothing else where they land.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from psrl.rollout.lmcache_tier import Tier, chunk_memory
from psrl.weights.channel.nixl_agent import Read, TransferAgent, TransferError


class ChunkReads:
    """The reads of one prefix: one a chunk."""

    def __init__(self, agent: TransferAgent, peer: str, chunks: Sequence[Any], addresses: Sequence[int]) -> None:
        """Read `addresses` at `peer` into `chunks`. TransferError if one cannot be posted; those before it go on (`under_way`)."""
        self.chunks: list[Any] = []
        self._reads: list[Read] = []
        self.failure = ""
        for chunk, address in zip(chunks, addresses, strict=True):
            try:
                self._reads.append(agent.read(peer, chunk_memory(chunk), address, 0))
            except TransferError as error:
                self.failure = str(error)
                break
            self.chunks.append(chunk)

    def done(self) -> bool:
        """All bytes are here, or `failure` says why not."""
        if not self.failure:
            try:
                return all(read.done() for read in self._reads)
            except TransferError as error:
                self.failure = str(error)
        return True

    def end(self) -> None:
        """After a `done` without failure."""
        for read in self._reads:
            read.end()

    def under_way(self) -> list[tuple[Read, Any]]:
        return list(zip(self._reads, self.chunks, strict=True))


class GivenUp:
    """Reads that nobody waits for any more."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._reads: list[tuple[Read, Any]] = []

    def __len__(self) -> int:
        return len(self._reads)

    def add(self, reads: Iterable[tuple[Read, Any]]) -> None:
        self._reads += reads

    def poll(self) -> None:
        """Free the memory of those that have ended."""
        self._reads = [(read, chunk) for read, chunk in self._reads if not self._ended(read, chunk)]

    def _ended(self, read: Read, chunk: Any) -> bool:
        try:
            if not read.done():
                return False
            read.end()
        except TransferError:
            pass  # failed: nothing arrives any more
        self._tier.drop([chunk])
        return True
