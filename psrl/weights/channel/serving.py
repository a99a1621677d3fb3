"""Who has weights to read answers questions and makes progress for its readers, on a thread of its own that sleeps without any."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from typing import Protocol

from psrl.net.server import Server
from psrl.net.waiting import Wakeup, wait
from psrl.protocol.weights import CloseRead, OpenRead, ReadGranted, ReadRefused, ToPublisher
from psrl.rundir.endpoints import Endpoint
from psrl.rundir.keys import RunKeys
from psrl.weights.channel.nixl_agent import PROGRESS_S

EXPIRY_S = 1.0
"""Pause between two looks for lost readers where none does."""

log = logging.getLogger(__name__)


def lease_end_s(request: OpenRead) -> float:
    """When (time.monotonic) the reader that asks now is taken for lost."""
    return time.monotonic() + max(request.lease_s, 0.0)


class Holder(Protocol):
    """What is served. All of it is called by the serving thread; a reader is the name of its connection."""

    def num_readers(self) -> int:
        """Those that may be reading now."""
        ...

    def progress(self) -> bool:
        """Let their reads go on; False if none of them needs this process for that."""
        ...

    def open(self, reader: str, request: OpenRead) -> ReadGranted | ReadRefused | None:
        """The answer; None if it comes later, from `late`."""
        ...

    def late(self) -> Iterable[tuple[str, ReadGranted | ReadRefused]]:
        """Answers that have become possible since; asked after each `wake`."""
        ...

    def leave(self, reader: str) -> None:
        """It has done with it, or is gone."""
        ...

    def expire(self) -> None:
        """Take those whose lease is over for lost."""
        ...


class Serving:
    """Bound at once, answers after `start`. `peers`: connections to expect."""

    def __init__(self, keys: RunKeys, address: str, holder: Holder, *, name: str, peers: int) -> None:
        self.failure: Exception | None = None
        """What the thread has ended with."""
        self._holder = holder
        self._server = Server(keys, address, ToPublisher, name=name, peers=peers)
        self._wakeup = Wakeup()
        self._stopping = self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def endpoint(self) -> Endpoint:
        """For others to find it by."""
        return Endpoint(address=self._server.endpoint, node=socket.gethostname(), pid=os.getpid())

    def wake(self) -> None:
        """From any thread, at any time: there are late answers."""
        with self._closing:
            if not self._closed:
                self._wakeup.set()

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._stopping = True
        self._wakeup.set()
        self._thread.join()
        self._server.close(0.0)
        with self._closing:
            self._closed = True
            self._wakeup.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except Exception as error:  # told to the owner when it looks next
            self.failure = error
            log.exception("serving weights failed")

    def _round(self) -> None:
        reading = self._holder.num_readers() > 0
        if reading and self._holder.progress():
            time.sleep(PROGRESS_S)
        else:
            wait([self._server, self._wakeup], EXPIRY_S if reading else 60.0)
        for peer, message in self._server.poll(0.0):
            if isinstance(message, OpenRead):
                self._answer(peer, self._holder.open(peer.hex(), message))
            elif isinstance(message, CloseRead):
                self._holder.leave(peer.hex())
        for peer in self._server.lost_peers():
            self._holder.leave(peer.hex())
        if self._wakeup.clear():
            for reader, answer in self._holder.late():
                self._answer(bytes.fromhex(reader), answer)
        if reading:
            self._holder.expire()

    def _answer(self, peer: bytes, answer: ReadGranted | ReadRefused | None) -> None:
        if answer is not None:
            self._server.send(peer, answer)
