"""One wait for everything that a loop serves: servers, clients, links, children, signals."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Protocol

import zmq


class Waitable(Protocol):
    """Something to poll: `Server`, `Client`, `CoordinatorLink`, `Children`, `Wakeup`."""

    def waitables(self) -> Sequence[zmq.Socket | int]:
        """Sockets and descriptors whose readability means "poll me"."""
        ...

    def due_in_s(self) -> float:
        """Seconds after which it wants to be polled anyway."""
        ...


def wait(parts: Sequence[Waitable], timeout_s: float) -> None:
    """Return when one of `parts` has something, wants its turn, or after `timeout_s`. Then poll each with 0.

    A part whose messages were left unread returns at once again, so nothing is missed between two waits.
    """
    poller = zmq.Poller()
    for part in parts:
        for source in part.waitables():
            poller.register(source, zmq.POLLIN)
    wait_s = min([timeout_s, *(part.due_in_s() for part in parts)])
    poller.poll(None if math.isinf(wait_s) else math.ceil(1000 * max(0.0, wait_s)))


class Wakeup:
    """Ends a `wait` from a signal handler or another thread."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> bool:
        """True if it was set since the last call."""
        try:
            return os.eventfd_read(self._descriptor) > 0
        except BlockingIOError:
            return False

    def waitables(self) -> list[int]:
        return [self._descriptor]

    def due_in_s(self) -> float:
        return math.inf

    def close(self) -> None:
        os.close(self._descriptor)
