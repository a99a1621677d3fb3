"""The link that every role keeps to the coordinator: find it, say hello, notice its loss, find its successor."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import zmq

from psrl.config.schema import FaultToleranceConfig
from psrl.net.client import AsyncClient, Client
from psrl.net.limits import new_context
from psrl.net.link_state import CoordinatorGoneError, LinkState, Phase
from psrl.protocol.control import FromCoordinator, Hello, Leaving, Welcome
from psrl.rundir.endpoints import Endpoint, latest_endpoint
from psrl.rundir.keys import load_keys
from psrl.rundir.layout import RunDir

__all__ = ["COORDINATOR", "AsyncCoordinatorLink", "CoordinatorGoneError", "CoordinatorLink"]

COORDINATOR = "coordinator"
"""The name under which the coordinator publishes its endpoint."""

_GOODBYE_S = 1.0  # longest wait for the last messages to leave


class _Link:
    """What the two flavours share; only their waiting differs.

    `state` builds the snapshot that goes with each Hello: it is called anew on every (re)connection, so whatever a lost
    message said is said again. Loading the keys waits for a run directory that appears late on this node.
    """

    def __init__(
        self,
        run_dir: RunDir,
        role: str,
        name: str,
        state: Callable[[], Any],
        limits: FaultToleranceConfig,
    ) -> None:
        self.run_dir, self.role, self.name = run_dir, role, name
        self.welcome: Welcome | None = None
        """The newest Welcome; None until the first."""
        self._snapshot = state
        self._context = new_context()  # its own, so that a goodbye can be waited for
        self._client = Client(
            load_keys(run_dir, limits.hello_timeout_s),
            FromCoordinator,
            name=name,
            heartbeat_interval_s=limits.heartbeat_interval_s,
            heartbeat_timeout_s=limits.heartbeat_timeout_s,
            context=self._context,
        )
        self._state = LinkState(limits, time.monotonic())
        self._pending: list[Any] = []

    @property
    def connected(self) -> bool:
        return self._state.phase is Phase.WELCOMED

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def clock_offset_s(self) -> float:
        """Add to this process's monotonic clock to get the coordinator's; wrong by `clock_error_s` at most."""
        return self._state.clock_offset_s

    @property
    def clock_error_s(self) -> float:
        return self._state.clock_error_s

    def due_in_s(self) -> float:
        return 0.0 if self._pending else min(self._client.due_in_s(), self._state.due_in_s(time.monotonic()))

    def waitables(self) -> list[zmq.Socket]:
        return self._client.waitables()

    def _accept(self, messages: list[Any]) -> list[Any]:
        """Messages that count: a believed Welcome, and what comes after it."""
        accepted = []
        for message in messages:
            if isinstance(message, Welcome):
                if not self._state.welcomed(time.monotonic(), message):
                    continue
                self.welcome, self._client.epoch = message, message.epoch
            elif not self.connected:
                continue
            accepted.append(message)
        return accepted

    def _opened(self) -> Welcome:
        """The first Welcome; what came right behind it stays for the next poll."""
        welcome, *self._pending = self._pending
        return welcome

    def _take_pending(self) -> list[Any]:
        pending, self._pending = self._pending, []
        return pending

    def _look_due(self) -> bool:
        return self._state.tick(
            time.monotonic(), self._client.server_silent_s(), self._client.broken, self._client.trouble
        )

    def _steer(self, found: tuple[int, Endpoint] | None) -> None:
        """Connect to what a look has found, say hello once the connection stands."""
        if found is not None and self._state.found(time.monotonic(), found[0]):
            self._client.connect(found[1].address)
        if self._state.phase is Phase.GREETING and self._client.established and not self._state.hello_said:
            self._state.said_hello()
            hello = Hello(
                role=self.role,
                name=self.name,
                node=socket.gethostname(),
                pid=os.getpid(),
                sent_s=time.monotonic(),
                attempt=os.environ.get("PSRL_ATTEMPT", "0"),
                state=self._snapshot(),
            )
            self._client.send(hello)

    def _look(self) -> tuple[int, Endpoint] | None:
        return latest_endpoint(self.run_dir, COORDINATOR)

    def _send(self, message: Any) -> bool:
        return self.connected and self._client.send(message)

    def _close(self, reason: str | None) -> None:
        if reason is not None:
            self._send(Leaving(reason=reason))
        self._client.close(_GOODBYE_S)
        self._context.term()


class CoordinatorLink(_Link):
    """For synchronous loops (supervisor, trainer, instance)."""

    def open(self) -> Welcome:
        """Meet the coordinator; CoordinatorGoneError after `hello_timeout_s`. Messages that follow come with `poll`."""
        while not self.connected:
            self._pending += self._round(self.due_in_s())
        return self._opened()

    def poll(self, timeout_s: float) -> list[Any]:
        """Messages of the coordinator (a new Welcome among them after a reconnect), waiting up to `timeout_s`.

        Raises CoordinatorGoneError after `fence_s` without a coordinator.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            messages = self._take_pending() or self._round(min(left, self.due_in_s()))
            if messages or left == 0.0:
                return messages

    def send(self, message: Any) -> bool:
        """False while there is no coordinator: then the next Hello tells what it needs to know."""
        return self._send(message)

    def close(self, reason: str | None = None) -> None:
        """Close; with a `reason` say goodbye first (Leaving)."""
        self._close(reason)

    def _round(self, wait_s: float) -> list[Any]:
        messages = self._accept(self._client.poll(wait_s))
        self._steer(self._look() if self._look_due() else None)
        return messages


class AsyncCoordinatorLink(_Link):
    """For asyncio (agent loops); one task receives, any may send."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._async_client = AsyncClient(self._client)

    async def open(self) -> Welcome:
        """Meet the coordinator; CoordinatorGoneError after `hello_timeout_s`."""
        while not self.connected:
            self._pending += await self._round(self.due_in_s())
        return self._opened()

    async def recv(self, timeout_s: float) -> list[Any]:
        """As `CoordinatorLink.poll`."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            messages = self._take_pending() or await self._round(min(left, self.due_in_s()))
            if messages or left == 0.0:
                return messages

    def send(self, message: Any) -> bool:
        """False while there is no coordinator: then the next Hello tells what it needs to know."""
        return self.connected and self._async_client.send(message)

    def close(self, reason: str | None = None) -> None:
        """Close; with a `reason` say goodbye first (Leaving)."""
        self._close(reason)

    async def _round(self, wait_s: float) -> list[Any]:
        messages = self._accept(await self._async_client.recv(wait_s))
        # In a thread: a look may hang with the filesystem, and the event loop must go on.
        self._steer(await asyncio.to_thread(self._look) if self._look_due() else None)
        return messages
