"""The endpoint as a part of a running event loop: bound first, so that its URL is known before anyone needs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from math import ceil

import uvicorn
from starlette.types import ASGIApp

log = logging.getLogger(__name__)
POLL_S = 0.01
KEEP_ALIVE_S = 120
"""An idle connection is kept for longer than clients keep theirs (5 s is usual): the end that closes must be the one that will not
send a request at the same moment."""
STOP_MARGIN_S = 10.0


class _Server(uvicorn.Server):
    """Leaves signals to the process that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class SessionServer:
    """Serves `app` on one address of this host.

    >>> async def run(app):
    ...     server = SessionServer(app, "127.0.0.1")
    ...     await server.start()
    ...     ...  # server.url; `server.failed` says if it has ended by itself
    ...     await server.stop()
    """

    def __init__(self, app: ASGIApp, host: str, port: int = 0, client_timeout_s: float = 60.0):
        """Binds (port 0: any that is free). A client that takes nothing, or is gone without a word, is given up by the kernel after
        `client_timeout_s`. OSError if the address cannot be bound."""
        self._socket = bound_socket(host, port, client_timeout_s)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", proxy_headers=False, server_header=False,
            backlog=2048, timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        self._config = config
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float = 30.0) -> None:
        """Returns when requests are answered. TimeoutError, or what went wrong."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        async with asyncio.timeout(timeout_s):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                    raise RuntimeError("the server ended while it started")
                await asyncio.sleep(POLL_S)

    @property
    def failed(self) -> bool:
        """Whether it no longer serves although nobody stopped it."""
        return self._serving is not None and self._serving.done() and not self._server.should_exit

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Take no new connections; requests that have not ended after `timeout_s` (whole seconds) are cancelled. Raises what
        the server failed with, if it did."""
        if self._serving is None:
            self._socket.close()
            return
        self._config.timeout_graceful_shutdown = ceil(timeout_s)
        self._server.should_exit = True
        try:
            async with asyncio.timeout(timeout_s + STOP_MARGIN_S):
                await self._serving
                while self._server.server_state.tasks:  # cancelled, and aborting their turns
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("the session endpoint did not stop within %g s", timeout_s + STOP_MARGIN_S)


def bound_socket(host: str, port: int, client_timeout_s: float) -> socket.socket:
    """Accepted connections inherit the options."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ceil(client_timeout_s * 1000))
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
