"""The listening side: one ROUTER socket behind CURVE and an allow-list, for one synchronous loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

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
from psrl.net.limits import new_context, raise_descriptor_limit
from psrl.net.zap import DOMAIN, AllowList
from psrl.rundir.keys import RunKeys

_BATCH = 20_000  # messages that one poll returns at most, so that heartbeats go on under load
_QUEUED = 100_000  # messages that wait for one slow peer before it counts as lost

_logger = logging.getLogger(__name__)


class Server:
    """Binds first and knows its endpoint then. Not thread-safe: the owner's one loop calls it.

    `decode`: the union of messages that may arrive; anything else is counted, logged and dropped. `epoch` > 0 refuses
    messages of any other epoch (the sender is told to say hello again); messages of type `greeting` are taken in epoch
    0 too. `preferred_port` is tried first: a restarted server that gets its old port back is found again without a look
    at the shared filesystem. `peers`: connections to expect; refused if the limit of open files is too small.

    A peer is lost when its connection is gone: it closed, died, was stopped, or its node fell silent for
    `heartbeat_timeout_s`. A peer that computes for minutes between two polls is *not* lost (the transport itself
    answers for it); `quiet_s` tells how long its own loop has said nothing.
    """

    def __init__(
        self,
        keys: RunKeys,
        address: str,
        decode: Any,
        *,
        name: str = "server",
        epoch: int = 0,
        greeting: type | None = None,
        heartbeat_interval_s: float = 1.0,
        heartbeat_timeout_s: float = 20.0,
        peers: int = 64,
        preferred_port: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise_descriptor_limit(peers)
        self.epoch = epoch
        self.drops = Drops(_logger, name)
        self._codec = Codec(decode)
        self._greeting = greeting
        self._interval_s = heartbeat_interval_s
        self._clock = clock
        self._message_header = pack_header(MESSAGE, epoch)
        self._heard: dict[bytes, float] = {}
        self._lost: list[bytes] = []
        self._next_beat = clock() + heartbeat_interval_s
        self._context = new_context()
        self.allow_list = AllowList(self._context, [keys.client_public])
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._configure(keys, heartbeat_timeout_s)
            self._bind(address, preferred_port)
        except zmq.ZMQError as error:
            self.close(0.0)
            raise OSError(f"{name} cannot listen on {address}: {error.strerror}; see psrl.net.interface") from None
        self.endpoint: str = self._socket.last_endpoint.decode()

    def _configure(self, keys: RunKeys, heartbeat_timeout_s: float) -> None:
        socket = self._socket
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret.encode()
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        socket.setsockopt(zmq.BACKLOG, 4096)
        socket.rcvhwm, socket.sndhwm = 0, _QUEUED
        set_transport_heartbeat(socket, self._interval_s, heartbeat_timeout_s)

    def _bind(self, address: str, preferred_port: int | None) -> None:
        if preferred_port:
            try:
                self._socket.bind(f"tcp://{address}:{preferred_port}")
                return
            except zmq.ZMQError as error:
                _logger.info("port %d is not free again (%s): taking another", preferred_port, error.strerror)
        self._socket.bind(f"tcp://{address}:*")

    def poll(self, timeout_s: float) -> list[tuple[bytes, Any]]:
        """Everything that has arrived, as (peer, message), waiting up to `timeout_s` for the first.

        Returns early and empty when a peer was lost.
        """
        deadline = self._clock() + timeout_s
        while True:
            messages = self._drain()
            now = self._clock()
            self._beat(now)
            if messages or self._lost or now >= deadline:
                return messages
            self._socket.poll(math.ceil(1000 * (min(deadline, self._next_beat) - now)))

    def send(self, peer: bytes, message: Any) -> bool:
        """Send; False if the peer is gone, which `lost_peers` then reports too (unless it was never a peer)."""
        return self._send(peer, [peer, self._message_header, self._codec.encode(message)])

    def peers(self) -> list[bytes]:
        """Peers from which a message has been accepted and that are not lost."""
        return list(self._heard)

    def quiet_s(self, peer: bytes) -> float:
        """Seconds since `peer` last sent anything, heartbeats included."""
        return self._clock() - self._heard[peer]

    def lost_peers(self) -> list[bytes]:
        """Peers lost since the last call, each once. Poll first: what they sent before still counts."""
        lost, self._lost = self._lost, []
        return lost

    def waitables(self) -> list[zmq.Socket]:
        return [self._socket]

    def due_in_s(self) -> float:
        return max(0.0, self._next_beat - self._clock())

    def fd(self) -> int:
        """Descriptor for an event loop. It becomes readable on a *change*: call `poll(0)` on each wake-up and once
        after each `send`, before waiting again (`psrl.net.waiting.wait` knows that by itself)."""
        return self._socket.fileno()

    def close(self, linger_s: float = 1.0) -> None:
        """Close, giving what was sent last up to `linger_s` to leave."""
        self._socket.close(linger=int(1000 * linger_s))
        self._context.term()

    def _drain(self) -> list[tuple[bytes, Any]]:
        messages: list[tuple[bytes, Any]] = []
        receive, header, now = self._socket.recv_multipart, self._message_header, self._clock()
        for _ in range(_BATCH):
            try:
                peer, *frames = receive(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(frames) == 2 and frames[0] == header:
                    message = self._codec.decode(frames[1])
                elif (message := self._take_other(peer, frames)) is None:
                    continue
            except (BadFramesError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                self.drops.note("an undecodable message", f"from {peer!r}: {error}")
                continue
            self._heard[peer] = now
            messages.append((peer, message))
        return messages

    def _take_other(self, peer: bytes, frames: list[bytes]) -> Any:
        """Handle everything but a message of this epoch; returns a greeting, or None if there is nothing to pass on."""
        kind, epoch, payload = unpack(frames)
        if kind == MESSAGE and epoch == 0 and self._greeting is not None and payload is not None:
            message = self._codec.decode(payload)
            if isinstance(message, self._greeting):
                return message
        if peer in self._heard:
            self._heard[peer] = self._clock()
        if kind == PING and epoch in (0, self.epoch):
            self._send(peer, [peer, pack_header(PONG, self.epoch)])
        elif kind in (MESSAGE, PING):
            self.drops.note("a message of another epoch", f"{epoch} from {peer!r}, this is {self.epoch}")
            self._send(peer, [peer, pack_header(STALE, self.epoch)])
        return None

    def _beat(self, now: float) -> None:
        """Ping the quiet peers; one whose connection is gone cannot be routed to any more, and so is found out."""
        if now < self._next_beat:
            return
        self._next_beat = now + self._interval_s
        ping = pack_header(PING, self.epoch)
        for peer in [peer for peer, heard in self._heard.items() if now - heard >= self._interval_s]:
            self._send(peer, [peer, ping])

    def _send(self, peer: bytes, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            return True
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
        if self._heard.pop(peer, None) is not None:
            self._lost.append(peer)
        return False


def set_transport_heartbeat(socket: zmq.Socket, interval_s: float, timeout_s: float) -> None:
    """Let the library's own thread ping the other side and drop the connection after `timeout_s` without a sign."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * interval_s)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1000 * timeout_s)))
