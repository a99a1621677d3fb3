"""One publisher as a reader sees it: where it is, the question for a version, the answer.

The connection is kept from pull to pull: a new one would cost more than reading a small model out of the same GPU. One that
broke meanwhile, or on which a pull has failed, is made anew.
"""

from __future__ import annotations

import itertools
import time

from psrl.net.client import Client
from psrl.protocol.weights import CloseRead, FromPublisher, Location, OpenRead, ReadGranted, ShardLayout
from psrl.rundir.endpoints import latest_endpoint
from psrl.rundir.keys import RunKeys
from psrl.rundir.layout import RunDir
from psrl.weights.channel.base import PullError
from psrl.weights.channel.nixl_publisher import endpoint_name

LOOK_S = 0.5
"""Least time between two looks into the run directory."""
PATIENCE_S = 10.0
"""A publisher that is nowhere to be found, or lets nobody connect, for this long fails the pull."""
_LEASE_MARGIN_S = 1.0

_reads = itertools.count(1)


class Source:
    """Trainer rank `rank`; with `address`, a node there that passes weights on. `open`, then `poll` until it returns a grant,
    then `close`; again for the next version."""

    def __init__(self, run_dir: RunDir, keys: RunKeys, rank: int, address: str | None = None, name: str = "") -> None:
        self.rank = rank
        self.name = name or f"trainer rank {rank}"
        """For errors."""
        self._fixed_address = address
        self.met: str = ""
        """Name of the publisher's agent that the reader's agent has met; "" if none."""
        self.lost = False
        """A read from that agent has failed: it must be met anew."""
        self.layout: ShardLayout | None = None
        self.publisher: str = ""
        """Name of the publisher whose layout this is."""
        self.client = Client(keys, FromPublisher, name=f"weights-reader-{rank}")
        self._run_dir = run_dir
        self._generation = -1
        self._address: str | None = None
        self._question: OpenRead | None = None
        self._next_look_s = self._asked_s = 0.0

    def open(self, version: int, incarnation: int, deadline_s: float, location: Location, route: str = "auto") -> None:
        """Ask for this version, to be read to `location`; the answer comes from `poll`."""
        now_s = time.monotonic()
        self._question = OpenRead(
            read=next(_reads),
            version=version,
            incarnation=incarnation,
            lease_s=max(0.0, deadline_s - now_s) + _LEASE_MARGIN_S,
            location=location,
            route=route,
            known_agent="" if self.lost else self.met,
            known_layout=self.publisher,
        )
        self._next_look_s = now_s
        self._asked_s = now_s
        self.client.poll(0.0)  # notices that the connection has broken
        if self.client.established and not self.client.broken:
            self.client.send(self._question)
        elif self._address is not None:
            self._ask(self._address)

    def poll(self) -> ReadGranted | None:
        """The grant if it has come. PullError if the publisher refuses or is gone, and no newer one is there."""
        assert self._question is not None
        refusal = None
        for answer in self.client.poll(0.0):
            if answer.read != self._question.read:
                continue
            if isinstance(answer, ReadGranted):
                return answer
            if answer.final:
                raise PullError(f"{self.name}: {answer.cause}", retryable=False)
            refusal = answer.cause
        lost = self.client.broken if self._address is not None else None
        now_s = time.monotonic()
        if refusal or lost or (not self.client.established and now_s >= self._next_look_s):
            self._next_look_s = now_s + LOOK_S
            if self._follow():
                return None
        if refusal or lost:
            raise PullError(f"{self.name}: {refusal or lost}")
        if not self.client.established and now_s - self._asked_s > PATIENCE_S:
            trouble = self.client.trouble or "it does not answer"
            cause = "its endpoint is not published" if self._address is None else f"{self._address}: {trouble}"
            raise PullError(f"{self.name} could not be reached for {PATIENCE_S:g} s: {cause}")
        return None

    def close(self, keep: bool = False) -> None:
        """End the read, well (then the connection may be kept) or badly; harmless if there is none."""
        if self._question is not None:
            if self.client.established:
                self.client.send(CloseRead(read=self._question.read))
            self._question = None
        if not keep:
            self.client.close()

    def learn(self, grant: ReadGranted) -> ShardLayout:
        """The publisher's layout, from this grant or an earlier one."""
        if grant.layout is not None:
            self.publisher, self.layout = grant.publisher, grant.layout
        if self.layout is None:
            raise PullError(f"{self.name} did not say what it publishes")
        return self.layout

    def _follow(self) -> bool:
        """Look for a newer endpoint than the one in use (a restarted trainer's); True if there is one, and ask it."""
        generation, address = self._find()
        if address is None or generation <= self._generation:
            return False
        self._generation, self._address = generation, address
        self._ask(address)
        return True

    def _find(self) -> tuple[int, str | None]:
        if self._fixed_address is not None:
            return 0, self._fixed_address
        found = latest_endpoint(self._run_dir, endpoint_name(self.rank))
        return (-1, None) if found is None else (found[0], found[1].address)

    def silent_s(self) -> float:
        """Seconds for which it has given no sign of life, as of the last `poll`."""
        return self.client.server_silent_s()

    def _ask(self, address: str) -> None:
        assert self._question is not None
        self.client.connect(address)
        self.client.send(self._question)
