"""A node that passes one version on: others read it out of this node's store as it would be read from the trainers.

They may ask before it is here; the answer comes when it is. Nothing is copied or held back for them: if the store's slot is
written again, they notice by its header as they would at a trainer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

import torch

from psrl.protocol.weights import OpenRead, ReadGranted, ReadRefused
from psrl.rundir.endpoints import publish_next_endpoint
from psrl.rundir.keys import RunKeys
from psrl.rundir.layout import RunDir
from psrl.weights.channel.nixl_agent import TransferAgent, TransferError
from psrl.weights.channel.serving import Serving, lease_end_s
from psrl.weights.channel.slot_header import SlotHeader, read_header
from psrl.weights.route import HOST

PEERS = 16
"""Connections to expect, some left by those that have broken among them."""


def relay_name(version: int, incarnation: int) -> str:
    """The role name under which nodes that want this version publish themselves, one generation after the other."""
    return f"relay-{incarnation}-{version}"


class Relay:
    """Of one version; `number` is this node's in the order in which they came for it. See `serving.Holder`."""

    def __init__(self, run_dir: RunDir, keys: RunKeys, address: str, version: int, incarnation: int) -> None:
        self.version, self.incarnation = version, incarnation
        self._name = f"weights-relay-{secrets.token_hex(6)}"
        self._waiting: dict[str, OpenRead] = {}
        self._lease_ends_s: dict[str, float] = {}
        self._segment = torch.empty(0, dtype=torch.uint8)
        self._slots: tuple[tuple[torch.Tensor, SlotHeader], ...] | None = None
        self._refusal: str | None = None
        self._agent: TransferAgent | None = None
        self._serving = Serving(keys, address, self, name=self._name, peers=PEERS)
        self._serving.start()
        self.number = publish_next_endpoint(run_dir, relay_name(version, incarnation), self._serving.endpoint())

    @property
    def settled(self) -> bool:
        """It has said whether the version is here."""
        return self._slots is not None or self._refusal is not None

    def offer(self, segment: torch.Tensor, slots: Sequence[tuple[torch.Tensor, SlotHeader]]) -> None:
        """The version is here, whole: these slots of the store's segment."""
        self._segment, self._slots = segment, tuple(slots)
        self._serving.wake()

    def refuse(self, cause: str) -> None:
        """It will not come: whoever waits is told to look elsewhere."""
        self._refusal = cause
        self._serving.wake()

    def close(self) -> None:
        self._serving.stop()
        if self._agent is not None and self._lease_ends_s:
            self._agent.outlive_process([self._segment])

    # ---- the serving thread --------------------------------------------------------------------------------------

    def num_readers(self) -> int:
        return len(self._lease_ends_s)

    def progress(self) -> bool:
        if self._agent is not None:
            self._agent.progress()
        return self._agent is not None

    def open(self, reader: str, request: OpenRead) -> ReadGranted | ReadRefused | None:
        if self._refusal is not None:
            return ReadRefused(read=request.read, cause=self._refusal)
        if self._slots is None:
            self._waiting[reader] = request
            return None
        if any(read_header(slot) != header for slot, header in self._slots):
            return ReadRefused(read=request.read, cause=f"version {self.version} is not here any more")
        try:
            agent = self._readable()
        except TransferError as error:
            return ReadRefused(read=request.read, cause=str(error))
        self._lease_ends_s[reader] = lease_end_s(request)
        return ReadGranted(
            read=request.read,
            publisher=self._name,
            route="nixl",
            memory=HOST,
            why="passed on",
            address=self._segment.data_ptr(),
            nbytes=self._segment.nbytes,
            device=0,
            sequence=0,
            checksums=(),
            agent=agent.name,
            metadata=agent.metadata(),
            layout=None,
            shared=None,
        )

    def late(self) -> Iterable[tuple[str, ReadGranted | ReadRefused]]:
        waiting, self._waiting = self._waiting, {}
        answers = [(reader, self.open(reader, request)) for reader, request in waiting.items()]
        return [(reader, answer) for reader, answer in answers if answer is not None]

    def leave(self, reader: str) -> None:
        self._waiting.pop(reader, None)
        self._lease_ends_s.pop(reader, None)

    def expire(self) -> None:
        now_s = time.monotonic()
        self._lease_ends_s = {reader: end for reader, end in self._lease_ends_s.items() if end > now_s}

    def _readable(self) -> TransferAgent:
        if self._agent is None:
            agent = TransferAgent(self._name)
            agent.register(self._segment)
            self._agent = agent
        return self._agent
