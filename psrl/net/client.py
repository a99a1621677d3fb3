"""The connecting side: one DEALER socket, for a synchronous loop (`Client`) or for asyncio (`AsyncClient`)."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from psrl.net.framing import (
    LARGEST_MESSAGE,
    MESSAGE,
    PING,
    PONG,
    STALE,
    BadFramesError,
    Codec,
    Drops,
    pack_header,
    unpack,
)
from psrl.net.server import set_transport_heartbeat
from psrl.rundir.keys import RunKeys

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
)  # fmt: skip

_logger = logging.getLogger(__name__)


class Client:
    """One connection at a time. Not thread-safe: the owner's one loop calls it.

    A connection that was established and then lost is never repaired in silence, since what was under way is gone:
    `broken` then says why, sending returns False, and the owner connects again and says what it holds. Before that,
    an endpoint that does not answer yet is tried for as long as the owner likes (`trouble` says what happens).
    """

    def __init__(
        self,
        keys: RunKeys,
        decode: Any,
        *,
        name: str,
        heartbeat_interval_s: float = 1.0,
        heartbeat_timeout_s: float = 20.0,
        context: zmq.Context | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.epoch = 0
        """Goes with each message; messages of another epoch are ignored once this is not 0."""
        self.established = False
        self.broken: str | None = "not connected"
        self.trouble: str | None = None
        self.drops = Drops(_logger, name)
        self._keys = keys
        self._codec = Codec(decode)
        self._interval_s = heartbeat_interval_s
        self._timeout_s = heartbeat_timeout_s
        self._context = context or zmq.Context.instance()
        self._clock = clock
        self._socket: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None
        self._poller = zmq.Poller()
        self._heard = 0.0
        self._asked: float | None = None

    def connect(self, endpoint: str) -> None:
        """Begin to connect (a connection that there is gets closed); `established` turns true in a later `poll`."""
        self._drop(None)
        socket = self._context.socket(zmq.DEALER)
        socket.routing_id = f"{self.name}.{secrets.token_hex(4)}".encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
        set_transport_heartbeat(socket, self._interval_s, self._timeout_s)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.epoch, self.established, self.broken, self.trouble = 0, False, None, None
        self._heard, self._asked = self._clock(), None
        socket.connect(endpoint)

    def send(self, message: Any) -> bool:
        """Send in the current epoch; False if there is no connection to send it on."""
        if self._socket is None:
            return False
        self._socket.send_multipart([pack_header(MESSAGE, self.epoch), self._codec.encode(message)])
        return True

    def poll(self, timeout_s: float) -> list[Any]:
        """Messages that have arrived, waiting up to `timeout_s` for the first; also answers heartbeats.

        Returns early and empty when the connection was established or lost.
        """
        deadline = self._clock() + timeout_s
        while True:
            # Before reading: a send may swallow the descriptor's sign that something has arrived.
            self._beat(self._clock())
            messages = self._drain()
            changed = self._follow_events()
            if self.broken is not None and self._socket is not None:
                messages += self._drain()  # what the other side said last, before it went
                self._drop(self.broken)
            now = self._clock()
            if messages or changed or now >= deadline:
                return messages
            if self._socket is None:
                time.sleep(deadline - now)
                continue
            self._poller.poll(math.ceil(1000 * max(0.0, min(deadline - now, self._interval_s))))

    def server_silent_s(self) -> float:
        """Seconds for which the server has left a heartbeat unanswered (or a connect), 0 while it answers.

        Judged as of the last `poll`, so that time in which the owner did not poll counts against nobody.
        """
        now = self._clock()
        if self._socket is not None and not self.established:
            return now - self._heard
        return 0.0 if self._asked is None else now - self._asked

    def waitables(self) -> list[zmq.Socket]:
        return [part for part in (self._socket, self._monitor) if part is not None]

    def due_in_s(self) -> float:
        return self._interval_s

    def close(self, linger_s: float = 1.0) -> None:
        """Close, giving what was sent last up to `linger_s` to leave (in the background)."""
        self._drop("closed", linger_s)

    def _drop(self, cause: str | None, linger_s: float = 0.0) -> None:
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=int(1000 * linger_s))
        self._socket = self._monitor = None
        self.established, self.broken, self._asked = False, cause, None

    def _drain(self) -> list[Any]:
        messages: list[Any] = []
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._heard, self._asked = self._clock(), None
            try:
                kind, epoch, payload = unpack(frames)
                if kind == MESSAGE and payload is not None:
                    if self.epoch in (0, epoch):
                        messages.append(self._codec.decode(payload))
                    else:
                        self.drops.note("a message of another epoch", f"{epoch}, expected {self.epoch}")
                elif kind == PING:
                    self._socket.send_multipart([pack_header(PONG, self.epoch)])
                elif kind == STALE:
                    self.broken = f"the server is in epoch {epoch} now"
            except (BadFramesError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                self.drops.note("an undecodable message", str(error))
        return messages

    def _follow_events(self) -> bool:
        """Read what the library says about the connection; True if it was established or lost."""
        changed = self.broken is not None and self._socket is not None
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            kind, value = event["event"], event["value"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.established, changed = True, True
                self._heard, self._asked, self.trouble = self._clock(), None, None
            elif kind == zmq.EVENT_DISCONNECTED and self.established:
                self.broken, changed = "the connection was lost", True
            elif kind in (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_DISCONNECTED):
                self.trouble = self.trouble or "nobody answers at the endpoint"
            elif kind != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.trouble = f"the server refused this role's key or has another key than the run's (code {value})"
        return changed

    def _beat(self, now: float) -> None:
        # Asked by what was *received*: a client that only sends would otherwise never learn that nobody listens.
        if self._socket is None or not self.established or self._asked is not None:
            return
        if now - self._heard >= self._interval_s:
            self._socket.send_multipart([pack_header(PING, self.epoch)])
            self._asked = now


class AsyncClient:
    """`Client` for asyncio; one task at a time may be in `recv`, any may `send`.

    The library's descriptor signals changes only and every call on a socket may consume such a signal, so each send
    wakes the receiver to look again.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._waiter: asyncio.Future[None] | None = None

    def connect(self, endpoint: str) -> None:
        self.client.connect(endpoint)
        self._wake()

    def send(self, message: Any) -> bool:
        """Send without waiting (the queue is in memory); False if there is no connection."""
        sent = self.client.send(message)
        self._wake()
        return sent

    async def recv(self, timeout_s: float) -> list[Any]:
        """As `Client.poll`: messages, or an empty list on a change of the connection or after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            before = (self.client.established, self.client.broken)
            messages = self.client.poll(0.0)
            left = deadline - loop.time()
            if messages or left <= 0 or before != (self.client.established, self.client.broken):
                return messages
            await self._wait(min(left, self.client.due_in_s()))

    def close(self, linger_s: float = 1.0) -> None:
        self.client.close(linger_s)
        self._wake()

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        descriptors = [part.fileno() for part in self.client.waitables()]
        for descriptor in descriptors:
            loop.add_reader(descriptor, self._wake)
        timer = loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
