"""A worker's side of transfers that others make: it keeps chunks in place while they are read, for a lease at most.

The reader counts its lease from before it asked, so its lease is over first: whatever it has read by then was in place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psrl.net.server import Server
from psrl.rollout.lmcache_messages import LONGEST_LEASE_S, Have, Want
from psrl.rollout.lmcache_tier import Tier
from psrl.weights.channel.nixl_agent import TransferAgent

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lease:
    chunks: list[Any]
    until_s: float


class PrefixSource:
    """`server` takes `ToSource`; `agent` has the tier's memory registered. Not thread-safe: `poll` it from one loop."""

    def __init__(
        self, tier: Tier, agent: TransferAgent, server: Server, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tier, self._agent, self._server, self._clock = tier, agent, server, clock
        self._metadata = agent.metadata()
        self._leases: dict[tuple[bytes, int], _Lease] = {}
        self.expired = 0
        """Leases that ran out before their reader was done."""

    @property
    def kept(self) -> int:
        """Chunks that are kept in place now."""
        return sum(len(lease.chunks) for lease in self._leases.values())

    def poll(self) -> None:
        """Answer what has been asked; let go of what has been read, was given up, or whose reader is gone."""
        for peer, message in self._server.poll(0.0):
            self._end(peer, message.pull)
            if isinstance(message, Want):
                self._server.send(peer, self._have(peer, message))
        for peer in self._server.lost_peers():
            for reader, pull in list(self._leases):
                if reader == peer:
                    self._end(reader, pull)
        now = self._clock()
        for reader, pull in [key for key, lease in self._leases.items() if now >= lease.until_s]:
            self._end(reader, pull)
            self.expired += 1
            log.warning("%s has not read the prefix that it wanted within its lease: it is let go of", reader.decode())
        if self._leases:
            self._agent.progress()

    def due_in_s(self) -> float:
        """Seconds until a lease ends."""
        return min((lease.until_s for lease in self._leases.values()), default=float("inf")) - self._clock()

    def close(self) -> None:
        for reader, pull in list(self._leases):
            self._end(reader, pull)

    def _have(self, peer: bytes, want: Want) -> Have:
        until_s = self._clock() + min(max(want.lease_s, 0.0), LONGEST_LEASE_S)
        if want.layout != self._tier.layout:
            return self._answer(want, [], f"chunks there are {self._tier.layout}, not {want.layout}")
        free = max(0, self._tier.largest_pull - self.kept)
        chunks = self._tier.keep(self._tier.keys(want.hashes[:free], want.tags))
        if chunks:
            self._leases[peer, want.pull] = _Lease(chunks, until_s)
        cut = len(chunks) == free < len(want.hashes)
        return self._answer(want, chunks, "as much as may be is kept for others already" if cut else "")

    def _answer(self, want: Want, chunks: list[Any], cause: str) -> Have:
        return Have(
            pull=want.pull,
            addresses=[chunk.data_ptr for chunk in chunks],
            agent=self._agent.name,
            metadata=b"" if want.known_agent == self._agent.name else self._metadata,
            cause=cause,
        )

    def _end(self, peer: bytes, pull: int) -> None:
        if (lease := self._leases.pop((peer, pull), None)) is not None:
            self._tier.let_go(lease.chunks)
