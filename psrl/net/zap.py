"""The allow-list of a listener: without one, CURVE admits every client that knows the server's public key."""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Collection

import zmq
from zmq.utils import z85

from psrl.net.framing import Drops

DOMAIN = b"psrl"
_ENDPOINT = "inproc://zeromq.zap.01"

_logger = logging.getLogger(__name__)


class AllowList:
    """Answers the library's authentication questions of one context from a small thread of its own, so that peers get
    in (or are refused) also while the owner's loop computes. Start it before the context's first bind; it ends with
    the context. `allowed` holds Z85 public keys of clients.
    """

    def __init__(self, context: zmq.Context, allowed: Collection[str]) -> None:
        self._allowed = [z85.decode(key.encode()) for key in allowed]
        self.drops = Drops(_logger, "allow-list")
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, args=(socket,), name="psrl-allow-list", daemon=True)
        self._thread.start()

    def _serve(self, socket: zmq.Socket) -> None:
        try:
            while True:
                socket.send_multipart(self._answer(socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, address, _routing_id, mechanism, *credentials = request
        known = domain == DOMAIN and mechanism == b"CURVE" and len(credentials) == 1
        if known and any(hmac.compare_digest(credentials[0], key) for key in self._allowed):
            return [version, request_id, b"200", b"OK", b"", b""]
        self.drops.note("a client whose key is not on the list", f"from {address.decode(errors='replace')}")
        return [version, request_id, b"400", b"key is not on the list", b"", b""]
