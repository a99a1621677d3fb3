"""A worker's side of transfers that it makes: ask the source what it has, read it, file it, each within its deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psrl.net.client import Client
from psrl.rollout.lmcache_messages import LONGEST_LEASE_S, Done, Have, PullEnd, PullOrder, Want
from psrl.rollout.lmcache_reads import ChunkReads, GivenUp
from psrl.rollout.lmcache_tier import Tier
from psrl.weights.channel.nixl_agent import TransferAgent, TransferError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Source:
    """An instance that this worker reads from. `met`: its agent, once that is known here."""

    name: str
    client: Client
    met: str = ""


@dataclass(slots=True)
class _Pull:
    order: PullOrder
    hashes: list[int]
    keys: list[Any]
    """Of the chunks that are not here."""
    here: int
    """Chunks before them, which are."""
    until_s: float
    source: Source | None = None
    have: Have | None = None
    reads: ChunkReads | None = None
    filling: int = 0
    """Chunks that it has been given a turn for."""


class PrefixPulls:
    """`reach` finds a source by its instance's name and begins to connect to it (None: it is nowhere). `pin_at_once`: each
    source keeps the entries from when the order is here; without, from when its turn has come. Not thread-safe: one loop.

    Turns: no more memory is being filled at a time than `Tier.largest_pull` chunks, except by a pull that is alone.
    """

    def __init__(
        self,
        tier: Tier,
        agent: TransferAgent,
        reach: Callable[[str], Client | None],
        *,
        pin_at_once: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier, self._agent, self._reach, self._clock = tier, agent, reach, clock
        self._pin_at_once = pin_at_once
        self._sources: dict[str, Source] = {}
        self._pulls: dict[int, _Pull] = {}
        self._ends: list[PullEnd] = []
        self._given_up = GivenUp(tier)

    # ---- what the loop calls ---------------------------------------------------------------------------------

    def start(self, order: PullOrder) -> None:
        until_s = self._clock() + min(order.timeout_s, LONGEST_LEASE_S)
        hashes = self._tier.hashes(order.token_ids)
        keys = self._tier.keys(hashes, order.tags)
        here = self._tier.count(keys)
        self._pulls[order.pull] = pull = _Pull(order, hashes[here:], keys[here:], here, until_s)
        if not pull.keys:
            self._end(pull)

    def poll(self) -> None:
        self._hear()
        self._given_up.poll()
        for pull in list(self._pulls.values()):
            if self._clock() >= pull.until_s:
                self._end(pull, "it took too long")
            elif pull.reads is not None and pull.reads.done():
                self._file(pull)
        for pull in list(self._pulls.values()):
            self._advance(pull)

    def ended(self) -> list[PullEnd]:
        """Those that have ended since the last call."""
        ends, self._ends = self._ends, []
        return ends

    @property
    def reading(self) -> bool:
        """Something moves: poll often."""
        return len(self._given_up) > 0 or any(pull.reads is not None for pull in self._pulls.values())

    def clients(self) -> list[Client]:
        return [source.client for source in self._sources.values() if source.client.broken is None]

    def due_in_s(self) -> float:
        """Seconds until the next deadline."""
        return min((pull.until_s for pull in self._pulls.values()), default=float("inf")) - self._clock()

    def close(self) -> bool:
        """End everything; False if a read goes on, whose agent and memory must not be freed then."""
        for pull in list(self._pulls.values()):
            self._end(pull, "this instance ends")
        for source in self._sources.values():
            source.client.close()
        self._given_up.poll()
        return len(self._given_up) == 0

    # ---- one pull --------------------------------------------------------------------------------------------

    def _advance(self, pull: _Pull) -> None:
        if pull.source is None:
            wanted = 0 if self._pin_at_once else min(len(pull.keys), self._tier.largest_pull)
            if self._may_fill(wanted):
                pull.filling = wanted
                self._ask(pull)
        elif (
            pull.have is not None and pull.reads is None and (pull.filling or self._may_fill(len(pull.have.addresses)))
        ):
            self._read(pull, pull.have)

    def _may_fill(self, count: int) -> bool:
        filling = len(self._given_up) + sum(pull.filling for pull in self._pulls.values())
        return filling == 0 or filling + count <= self._tier.largest_pull

    def _ask(self, pull: _Pull) -> None:
        source = self._source(pull.order.source)
        if source is None:
            self._end(pull, "nobody knows where it is")
            return
        pull.source = source
        source.client.send(
            Want(
                pull=pull.order.pull,
                hashes=pull.hashes[: self._tier.largest_pull],
                tags=pull.order.tags,
                lease_s=pull.until_s - self._clock(),
                layout=self._tier.layout,
                known_agent=source.met,
            )
        )

    def _hear(self) -> None:
        for source in list(self._sources.values()):
            for have in source.client.poll(0.0):
                pull = self._pulls.get(have.pull)
                if pull is None or pull.source is not source:
                    source.client.send(Done(pull=have.pull))  # it had been given up
                else:
                    pull.have = have
            if trouble := source.client.broken or (not source.client.established and source.client.trouble):
                self._lose(source, str(trouble))

    def _read(self, pull: _Pull, have: Have) -> None:
        if not have.addresses:
            self._end(pull, have.cause)
            return
        assert pull.source is not None
        try:
            self._meet(pull.source, have)
        except TransferError as error:
            self._end(pull, str(error))
            return
        chunks = self._tier.room(len(have.addresses))
        pull.filling = len(chunks)
        pull.reads = ChunkReads(self._agent, pull.source.met, chunks, have.addresses[: len(chunks)])
        posted = len(pull.reads.chunks)
        self._tier.drop(chunks[posted:])
        if not chunks:
            self._end(pull, "there is no room for it here")

    def _file(self, pull: _Pull) -> None:
        assert pull.reads is not None and pull.have is not None
        if pull.reads.failure or self._clock() >= pull.until_s:  # what was read after the lease may be anything
            self._end(pull, pull.reads.failure or "it took too long")
            return
        reads, pull.reads = pull.reads, None
        reads.end()
        self._tier.put(pull.keys[: len(reads.chunks)], reads.chunks)
        short = len(reads.chunks) < len(pull.have.addresses)
        self._end(pull, "there is no room for all of it here" if short else pull.have.cause, moved=len(reads.chunks))

    def _end(self, pull: _Pull, cause: str = "", moved: int = 0) -> None:
        del self._pulls[pull.order.pull]
        if pull.reads is not None:
            self._given_up.add(pull.reads.under_way())
        if pull.source is not None:
            pull.source.client.send(Done(pull=pull.order.pull))
        size = self._tier.chunk_size
        end = PullEnd(pull=pull.order.pull, tokens=(pull.here + moved) * size, moved=moved * size, cause=cause)
        self._ends.append(end)

    # ---- sources ---------------------------------------------------------------------------------------------

    def _source(self, name: str) -> Source | None:
        if name not in self._sources:
            client = self._reach(name)
            if client is None:
                return None
            self._sources[name] = Source(name, client)
        return self._sources[name]

    def _meet(self, source: Source, have: Have) -> None:
        if have.agent != source.met:
            source.met = self._agent.add_peer(have.metadata)

    def _lose(self, source: Source, trouble: str) -> None:
        """Nobody answers there: its pulls end, and the next one looks for it anew."""
        del self._sources[source.name]
        source.client.close()
        for pull in [pull for pull in self._pulls.values() if pull.source is source]:
            self._end(pull, trouble)
