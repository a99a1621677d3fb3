"""A turn over HTTP while the client listens: server-sent events, and the end of the turn when the client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from psrl.sessions.replies import Completion, Failure, call_deltas, failure_of
from psrl.sessions.session import ChatReply, Delta

log = logging.getLogger(__name__)
T = TypeVar("T")
OnDelta = Callable[[Delta], None] | None
Answer = Callable[[OnDelta], Coroutine[Any, Any, ChatReply]]
"""Makes the turn, telling it on while it is being written."""
BROKEN = Failure(500, "The server failed to make this turn; its log says why.", "internal_error")


class ClientGoneError(Exception):
    """Nobody listens any more."""


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes first (ClientGoneError)."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await _end(working, leaving)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream:
    """The response to a streamed request, as an ASGI application.

    The turn never waits for the client: what the client has not taken yet is joined into its next event, so that a slow one
    holds at most the text of its turn. One that takes nothing for `send_timeout_s` is left, and its turn aborted. A turn
    that fails before its first event is an ordinary error response.
    """

    def __init__(
        self,
        answer: Answer,
        completion: Completion,
        include_usage: bool,
        send_timeout_s: float,
        error_response: Callable[[Failure], Callable[[Scope, Receive, Send], Awaitable[None]]],
    ):
        self._answer = answer
        self._completion = completion
        self._include_usage = include_usage
        self._send_timeout_s = send_timeout_s
        self._error_response = error_response
        self._pending: list[Delta] = []
        self._news = asyncio.Event()
        self._told = ""
        self._told_tokens = 0
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        making = asyncio.create_task(self._answer(self._hear))
        leaving = asyncio.create_task(gone(receive))
        for task in (making, leaving):
            task.add_done_callback(lambda _: self._news.set())
        try:
            while not making.done() and not leaving.done():
                await self._news.wait()
                self._news.clear()
                if not leaving.done():
                    await self._send_pending(send)
            if not leaving.done():
                await self._finish(making, scope, receive, send)
        except TimeoutError:
            log.warning("a client took nothing for %g s and is left", self._send_timeout_s)
        finally:
            await _end(making, leaving)

    def _hear(self, delta: Delta) -> None:
        if delta.text or (self._completion.logprobs and delta.token_ids):
            self._pending.append(delta)
            self._news.set()

    async def _send_pending(self, send: Send) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        text = "".join(delta.text for delta in pending)
        token_ids = [token for delta in pending for token in delta.token_ids]
        logprobs = [logprob for delta in pending for logprob in delta.logprobs]
        self._told += text
        self._told_tokens += len(token_ids)
        await self._chunk(send, self._completion.chunk({"content": text}, None, token_ids, logprobs))

    async def _finish(self, making: asyncio.Task[ChatReply], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = making.result()
        except Exception as error:
            await self._fail(error, scope, receive, send)
            return
        await self._send_pending(send)
        rest = (reply.message["content"] or "")[len(self._told) :]
        untold = slice(self._told_tokens, None) if self._completion.logprobs else slice(0)
        token_ids, logprobs = reply.token_ids[untold], reply.logprobs[untold]
        if rest or token_ids:
            await self._chunk(send, self._completion.chunk({"content": rest}, None, token_ids, logprobs))
        if calls := reply.message.get("tool_calls"):
            await self._chunk(send, self._completion.chunk({"tool_calls": call_deltas(calls)}))
        await self._chunk(send, self._completion.chunk({}, reply.finish_reason))
        if self._include_usage:
            await self._event(send, self._completion.usage_chunk(reply))
        await self._send(send, b"data: [DONE]\n\n", more=False)

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        if (failure := failure_of(error)) is None:
            log.error("a streamed turn failed", exc_info=error)
            failure = BROKEN
        if not self._started:
            await self._error_response(failure)(scope, receive, send)
            return
        await self._event(send, failure.body())
        await self._send(send, b"", more=False)

    async def _chunk(self, send: Send, chunk: dict[str, Any]) -> None:
        if not self._started:
            await self._start(send)
            await self._chunk(send, self._completion.chunk({"role": "assistant", "content": ""}))
        await self._event(send, chunk | {"usage": None} if self._include_usage else chunk)

    async def _start(self, send: Send) -> None:
        self._started = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _event(self, send: Send, event: dict[str, Any]) -> None:
        await self._send(send, b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": more})
