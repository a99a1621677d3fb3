"""Where a trainer rank's buffers come from: rank 0 talks to the coordinator, the others hear it from rank 0.

Only references travel; each rank reads its own samples from the run directory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from psrl.net.link import CoordinatorLink
from psrl.protocol import control as c
from psrl.role import Role

log = logging.getLogger("psrl.trainer")

KEEPALIVE_S = 30.0
"""While rank 0 waits it tells the other ranks so at least this often: their collectives have a deadline too."""

Order = c.Buffer | c.DrainNow | c.Shutdown
"""What a rank does next: train a buffer or a part of one (an empty buffer: the data is used up), drain, or leave."""


class Feed:
    """Rank 0's side. `published` and `checkpointed` are kept for Hello: a new coordinator hears them again."""

    def __init__(self, role: Role, resumed_from: int) -> None:
        self.published_version = -1
        self.checkpoint_version = -1
        self.wants: c.WantBuffer | None = None
        self.resumed_from = resumed_from
        self.role = role
        self.drain: c.DrainNow | None = None
        self.over: c.Shutdown | None = None
        self.done: c.TrainerDone | None = None
        self.link = CoordinatorLink(role.run_dir, "trainer", role.name, self._state, role.config.psrl.fault_tolerance)

    def open(self) -> c.Welcome:
        return self.link.open()

    @property
    def incarnation(self) -> int:
        welcome = self.link.welcome
        return welcome.incarnation if welcome else -1

    def _state(self) -> c.TrainerState:
        return c.TrainerState(
            published=self.published_version,
            resumed_from=self.resumed_from,
            start_nonce=self.role.attempt,
            wants=self.wants.buffer if self.wants else -1,
            checkpoint=self.checkpoint_version,
            taken=self.wants.taken if self.wants else 0,
            count=self.wants.count if self.wants else 0,
        )

    def published(self, version: int) -> None:
        """Weights `version` can be pulled."""
        self.published_version = version
        self.link.send(c.Published(version=version, incarnation=self.incarnation))

    def checkpointed(self, version: int, seconds: float) -> None:
        """The checkpoint at `version` is complete."""
        self.checkpoint_version = version
        self.link.send(c.CheckpointDone(version=version, seconds=seconds))

    def next(
        self,
        buffer: int,
        taken: int,
        count: int,
        alive: Callable[[], object],
        idle: Callable[[], object] = lambda: None,
    ) -> Order:
        """Wait for the next `count` groups of `buffer` after the first `taken` (or for what is left of it; `count` 0: all of
        that), for a drain or the end. `alive` is called at least every KEEPALIVE_S, `idle` about once a second.

        Raises CoordinatorGoneError when no coordinator comes back in time."""
        self.wants = c.WantBuffer(buffer=buffer, incarnation=self.incarnation, taken=taken, count=count)
        self.link.send(self.wants)
        next_alive = time.monotonic() + KEEPALIVE_S
        while True:
            if self.over is not None:
                return self.over
            if self.drain is not None:
                return self.drain
            for message in self.link.poll(1.0):
                if isinstance(message, c.Buffer) and (message.buffer, message.first) == (buffer, taken):
                    self.wants = None
                    return message
                self._note(message)
            idle()
            if time.monotonic() >= next_alive:
                next_alive = time.monotonic() + KEEPALIVE_S
                alive()

    def _note(self, message: object) -> None:
        match message:
            case c.DrainNow():
                log.warning("draining: %s", message.reason)
                self.drain = message
            case c.Shutdown():
                self.over = message
            case c.Welcome() if self.done is not None:
                self.link.send(self.done)

    def finish(self, version: int, *, drained: bool) -> c.Shutdown:
        """Say that training is over and wait for the verdict."""
        self.done = c.TrainerDone(version=version, drained=drained)
        self.link.send(self.done)
        while self.over is None:
            for message in self.link.poll(1.0):
                self._note(message)
        return self.over

    def close(self) -> None:
        self.link.close("leaving")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(c.Buffer | c.DrainNow | c.Shutdown | c.Welcome).decode


def broadcast_order(order: Order | None, rank: int, world_size: int) -> Order | None:
    """Rank 0's order to all ranks; None (rank 0 still waits) goes round too, as a sign of life."""
    if world_size == 1:
        return order
    payload = _encode(order) if rank == 0 and order is not None else b""
    size = torch.tensor([len(payload)], dtype=torch.int64)
    dist.broadcast(size, 0)
    if not int(size):
        return None
    body = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if rank == 0
        else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(body, 0)
    received = order if rank == 0 else _decode(body.numpy().tobytes())
    return received  # type: ignore[return-value]
