"""This node's place in the tree along which the first weights spread (`weights.broadcast`), for each incarnation anew.

Whoever fetches for the node takes the next number, asks the node that the plan names, and passes on what it gets. Where that node
is gone, silent, or does not have it, the trainers are asked, who have granted the read all along. What another node sent is judged
by the trainers' header and checksums, never by that node's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from psrl.net.waiting import wait
from psrl.protocol.weights import Location, ReadGranted
from psrl.rundir.endpoints import endpoint_of
from psrl.rundir.keys import RunKeys
from psrl.rundir.layout import RunDir
from psrl.rundir.retry import UnreadableError
from psrl.weights.broadcast import TRAINERS, source_of, worth_waiting
from psrl.weights.channel.base import PullError
from psrl.weights.channel.nixl_agent import TransferError
from psrl.weights.channel.nixl_source import Source
from psrl.weights.channel.relay import Relay, relay_name
from psrl.weights.channel.slot_header import SlotHeader
from psrl.weights.channel.wanted import Wanted

_LOOK_S = 5.0
"""Names on a shared filesystem may show late."""

log = logging.getLogger(__name__)


class Tree:
    """`begin` each pull, then `sources` when this process fetches for its node, `arrived` or `failed` in the end."""

    def __init__(self, run_dir: RunDir, keys: RunKeys, address: str, location: Location, fanout: int) -> None:
        self._run_dir, self._keys, self._address, self._fanout = run_dir, keys, address, fanout
        self._location = Location(location.host)
        self._incarnation = -1
        self.taking_part = False
        """The present pull is the first one of its incarnation."""
        self._asked_s = self._deadline_s = 0.0
        self._relay: Relay | None = None
        self._source: Source | None = None
        self.source = TRAINERS
        """Number of the node from which the latest pull is fetched, or TRAINERS."""

    def begin(self, version: int, incarnation: int, deadline_s: float) -> None:
        """A pull by `deadline_s` (time.monotonic) begins."""
        if self._relay is not None and (incarnation, version) >= (self._relay.incarnation, self._relay.version + 2):
            self._end_relay()  # its slot of the store is about to be written
        self.taking_part, self._incarnation = incarnation != self._incarnation, incarnation
        self._deadline_s, self.source = deadline_s, TRAINERS

    def sources(
        self, wanted: Sequence[Wanted], segment: torch.Tensor, slots: Sequence[torch.Tensor], check_time: Callable[[str], None]
    ) -> Sequence[Wanted]:  # fmt: skip
        """Where to read the `wanted` into the `slots` of the store: as they are, or from another node. Waits until that one has
        them; `check_time` is called meanwhile. TransferError if it does not give them."""
        if not self.taking_part or (self._relay is not None and self.source == TRAINERS):
            return wanted
        version, incarnation = wanted[0].header.version, wanted[0].header.incarnation
        self._relay = Relay(self._run_dir, self._keys, self._address, version, incarnation)
        self.source = source_of(self._relay.number, self._fanout)
        if self.source == TRAINERS:
            log.info("node %d of the broadcast reads from the trainers", self._relay.number)
            return wanted
        log.info("node %d of the broadcast reads from node %d", self._relay.number, self.source)
        source, grant = self._ask(version, incarnation, check_time)
        if grant.nbytes != segment.nbytes:
            raise TransferError(f"{source.name} has a store of {grant.nbytes} bytes, this one has {segment.nbytes}")
        granted: list[Wanted] = []
        for want, slot in zip(wanted, slots, strict=True):
            at = grant.address + slot.data_ptr() - segment.data_ptr()
            # All ranks come from one agent, which is met once.
            metadata = b"" if granted else grant.metadata
            there = msgspec.structs.replace(
                want.grant, address=at, device=grant.device, agent=grant.agent, metadata=metadata
            )
            granted.append(replace(want, source=source, grant=there))
        return granted

    def worth_waiting(self, heard_s: float) -> bool:
        """Whether the present source may still take its time; something has come from it at `heard_s` (time.monotonic)."""
        now_s = time.monotonic()
        return self.source == TRAINERS or worth_waiting(now_s, self._asked_s, heard_s, self._deadline_s)

    def turn_to_trainers(self, cause: str) -> bool:
        """Another node has failed us: from now on the trainers are the source. False if they are already."""
        if self.source == TRAINERS:
            return False
        log.warning("the trainers are asked for the weights after all: %s", cause)
        self._leave_source()
        self.source = TRAINERS
        return True

    def arrived(self, segment: torch.Tensor, slots: Sequence[tuple[torch.Tensor, SlotHeader]]) -> None:
        """The store has the version of this pull whole: pass it on."""
        self._leave_source()
        if self.taking_part and self._relay is not None and not self._relay.settled:
            self._relay.offer(segment, slots)

    def failed(self, cause: str) -> None:
        """This pull ends without the version."""
        self._leave_source()
        if self._relay is not None and not self._relay.settled:
            self._relay.refuse(cause)

    def close(self) -> None:
        self._leave_source()
        self._end_relay()

    def _ask(self, version: int, incarnation: int, check_time: Callable[[str], None]) -> tuple[Source, ReadGranted]:
        """It may be about to fetch it, too."""
        who = f"node {self.source} of the broadcast"
        self._asked_s = time.monotonic()
        try:
            found = endpoint_of(self._run_dir, relay_name(version, incarnation), self.source, _LOOK_S)
        except UnreadableError as error:
            raise TransferError(f"{who}: {error}") from error
        self._source = source = Source(self._run_dir, self._keys, 0, found.address, who)
        source.open(version, incarnation, self._deadline_s, self._location)
        while True:
            check_time(f"{who} did not pass the weights on")
            try:
                grant = source.poll()
            except PullError as error:
                raise TransferError(error.cause) from error
            if grant is not None:
                return source, grant
            if not self.worth_waiting(time.monotonic() - source.silent_s()):
                raise TransferError(f"{who} did not have the weights in time")
            wait([source.client], 0.05)

    def _leave_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None
