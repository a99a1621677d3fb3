"""A segment of host memory that others read by NIXL is offered by a process of its own.

Where no hardware reads memory by itself (TCP), UCX answers reads out of the process that offers it, and aborts that process when it
meets a question of a reader that has died meanwhile. So that must not be the trainer. It makes progress, too, while the
trainer's interpreter is busy. One that has ended is begun anew for the next reader.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from psrl.protocol.weights import SharedSlot
from psrl.supervisor.process import describe_exit, has_ended
from psrl.weights.channel.nixl_agent import PROGRESS_S, TransferAgent, TransferError
from psrl.weights.memory import map_shared

MODULE = "psrl.weights.channel.host_server"
START_S = 60.0
"""One that has not begun to offer the segment by then is given up."""
STILL_S = 10.0
"""One that leaves a word unanswered for so long is ended, with it the reads that hang there, and the next reader starts another."""
END_S = 5.0
_READING, _IDLE = b"+", b"-"
_UNTOUCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to a whole job step; this process ends with its owner and not before."""

log = logging.getLogger(__name__)


class _Order(msgspec.Struct, frozen=True):
    """Owner -> server, first and once: offer this segment, from the slot on, under this agent's name."""

    agent: str
    segment: SharedSlot


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Server -> owner, once: how a reader reaches the segment. `address` is where it begins in the memory of that process."""

    agent: str
    metadata: bytes
    address: int


class _Failure(msgspec.Struct, frozen=True, tag=True):
    """Server -> owner, in place of the offer."""

    cause: str


class HostServer:
    """Owned by the thread that answers readers. `changed` is called on another one when the segment has begun to be offered, or
    failed to. `name` is that of the agents, with a number behind it."""

    def __init__(self, name: str, segment: SharedSlot, changed: Callable[[], None]) -> None:
        self._name, self._segment, self._changed = name, segment, changed
        self._started = 0
        self._process: _Process | None = None

    def offer(self) -> Offer | None:
        """None while a process starts; ask again after `changed`. TransferError if it could not: the next call tries again."""
        process = self._process
        if process is not None and (process.ended or process.failure is not None):
            self.close()
            if process.failure is not None:
                raise TransferError(f"host memory cannot be offered to other hosts: {process.failure}")
        if self._process is None:
            self._started += 1
            order = _Order(f"{self._name}-{self._started}", self._segment)
            try:
                self._process = _Process(order, self._changed)
            except OSError as error:
                raise TransferError(f"no process can be started that offers host memory: {error}") from error
        return self._process.offer

    @property
    def pid(self) -> int | None:
        """Of the latest process; None before anybody asked."""
        return None if self._process is None else self._process.pid

    def serve(self, reading: bool) -> None:
        """Whether somebody may be reading; harmless if it is said again."""
        if self._process is not None:
            self._process.serve(reading)

    def close(self) -> None:
        """Reads that are under way fail."""
        if self._process is not None:
            self._process.close()
            self._process = None


class _Process:
    """One life of it. Ends when its owner closes the channel, or dies."""

    def __init__(self, order: _Order, changed: Callable[[], None]) -> None:
        self.offer: Offer | None = None
        self.failure: str | None = None
        self._changed, self._closing = changed, False
        self._said = self._answered = 0
        self._waits_since_s = 0.0
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "psrl.start", MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # it shall take nothing of the trainer's GPU
                )
            except OSError:
                self._channel.close()
                raise
        self.pid = self._process.pid
        self._channel.sendall(msgspec.json.encode(order) + b"\n")
        self._thread = threading.Thread(target=self._follow, name=order.agent, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        try:
            return has_ended(self._process)
        except ProcessLookupError:  # it is being reaped
            return True

    def serve(self, reading: bool) -> None:
        """Each such word is answered: that is how it shows that it is alive."""
        if self.offer is not None and not self.ended:
            if self._said == self._answered:
                self._waits_since_s = time.monotonic()
            self._said += 1
            with contextlib.suppress(OSError):  # it has just ended: the reader notices, and asks for the next
                self._channel.send(_READING if reading else _IDLE, socket.MSG_DONTWAIT)

    def close(self) -> None:
        self._closing = not self.ended  # how one has ended that did so by itself is worth a word
        if self.offer is None:
            self._process.kill()  # it has not begun to listen for the end
        with contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_RDWR)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()
        self._channel.close()

    def _follow(self) -> None:
        try:
            self.offer = self._first_words()
        except (OSError, msgspec.MsgspecError, TransferError) as error:
            self._process.kill()
            self.failure = str(error)
        self._changed()
        self._hear()
        how = describe_exit(self._process.wait())
        if not self._closing and self.failure is None:
            log.warning(
                "the process that offers weights to other hosts has ended (%s); the next reader starts another", how
            )

    def _first_words(self) -> Offer:
        self._channel.settimeout(START_S)
        try:
            said = msgspec.json.decode(_line(self._channel), type=Offer | _Failure)
        except TimeoutError as error:
            raise TransferError(f"it has not started within {START_S:g} s") from error
        except ConnectionError as error:
            raise TransferError(f"it has ended at once ({self._how_it_ended()})") from error
        if isinstance(said, _Failure):
            raise TransferError(said.cause)
        return said

    def _hear(self) -> None:
        """Its answers, until it ends or is told to. One that owes an answer for too long is killed."""
        self._channel.settimeout(STILL_S / 4)
        while True:
            try:
                heard = self._channel.recv(4096)
            except TimeoutError:
                if self._said > self._answered and time.monotonic() - self._waits_since_s > STILL_S:
                    log.warning("the process that offers weights to other hosts stood still for %g s", STILL_S)
                    self._process.kill()
                    return
            except OSError:
                return
            else:
                if not heard:
                    return
                self._answered += len(heard)
                self._waits_since_s = time.monotonic()

    def _how_it_ended(self) -> str:
        try:
            return describe_exit(self._process.wait(END_S))
        except subprocess.TimeoutExpired:
            return "but for its process"


def _line(channel: socket.socket) -> bytes:
    """ConnectionError if the other end closes first."""
    data = b""
    while not data.endswith(b"\n"):
        part = channel.recv(65536)
        if not part:
            raise ConnectionResetError("closed by the other end")
        data += part
    return data


def main(channel_fd: int) -> NoReturn:
    for number in _UNTOUCHED:
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=channel_fd)
    order = msgspec.json.decode(_line(channel), type=_Order)
    try:
        offered = map_shared(order.segment)[order.segment.offset :]
        agent = TransferAgent(order.agent)
        agent.register(offered)
        offer = Offer(order.agent, agent.metadata(), offered.data_ptr())
    except Exception as error:  # whatever keeps it from offering, the reader is told
        cause = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
        channel.sendall(msgspec.json.encode(_Failure(cause)) + b"\n")
        sys.exit(1)
    channel.sendall(msgspec.json.encode(offer) + b"\n")
    reading = False
    while True:
        if select.select([channel], [], [], PROGRESS_S if reading else None)[0]:
            said = channel.recv(4096)
            if not said:
                os._exit(0)  # an agent that is destroyed while it is read from may abort, and that only looks bad
            channel.sendall(said)
            reading = said.endswith(_READING)
        if reading:
            agent.progress()


if __name__ == "__main__":
    main(int(sys.argv[1]))
