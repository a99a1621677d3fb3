"""The HTTP face of sessions: OpenAI's chat completions below each session's own base URL, as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from psrl.sessions.errors import RefusedRequestError, SessionBusyError, TooManySessionsError, TurnTimeoutError
from psrl.sessions.parameters import ChatBody, chat_body
from psrl.sessions.replies import Completion, Failure, failure_of, model_json, session_json
from psrl.sessions.session import ChatReply, Session
from psrl.sessions.store import SessionStore
from psrl.sessions.stream import BROKEN, Answer, ClientGoneError, EventStream, OnDelta, unless_gone
from psrl.sessions.turns import SessionOverError

log = logging.getLogger(__name__)
RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for it; nobody reads it."""
READ_OFF = 8
"""A body of up to so many times the limit is read before it is refused."""
OURS = (RefusedRequestError, SessionOverError, SessionBusyError, TooManySessionsError, TurnTimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLimits:
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 60.0
    """Longest time that a client may take to send its request's body."""
    send_timeout_s: float = 60.0
    """Longest time that a client may take nothing of what it is sent."""


class FailureError(Exception):
    """Becomes an error response."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.failure = Failure(status, message, code)


def make_app(store: SessionStore, token: str, limits: EndpointLimits | None = None) -> ASGIApp:
    """The application; every path but /health wants `Authorization: Bearer {token}`."""
    endpoint = _Endpoint(store, limits or EndpointLimits())
    own = "/sessions/{session_id}"
    routes = [
        Route("/health", endpoint.health),
        Route("/v1/models", endpoint.models),
        Route("/v1/chat/completions", endpoint.chat_once, methods=["POST"]),
        Route("/sessions", endpoint.create, methods=["POST"]),
        Route(own, endpoint.show, methods=["GET"]),
        Route(own, endpoint.end, methods=["DELETE"]),
        Route(f"{own}/v1/models", endpoint.session_models),
        Route(f"{own}/v1/chat/completions", endpoint.chat, methods=["POST"]),
    ]
    handlers: dict[Any, Callable[..., Any]] = {
        FailureError: _on_failure,
        HTTPException: _on_http_exception,
        ClientGoneError: lambda request, error: Response(status_code=CLIENT_CLOSED_REQUEST),
        Exception: _on_anything,
        **dict.fromkeys(OURS, _on_session_error),
    }
    return _Authorized(Starlette(routes=routes, exception_handlers=handlers), token)


class _Authorized:
    """Lets through who knows the token."""

    def __init__(self, app: ASGIApp, token: str):
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                message = "The bearer token of this run is missing or wrong."
                refusal = error_response(Failure(HTTPStatus.UNAUTHORIZED, message, "invalid_api_key"))
                refusal.headers["www-authenticate"] = "Bearer"
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Endpoint:
    def __init__(self, store: SessionStore, limits: EndpointLimits):
        self._store = store
        self._limits = limits

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [model_json(self._store.model)]})

    async def session_models(self, request: Request) -> Response:
        self._session(request)
        return await self.models(request)

    async def create(self, request: Request) -> Response:
        raw = await read_body(request, self._limits)
        options = decoded(raw) if raw.strip() else {}
        if not isinstance(options, dict):
            raise RefusedRequestError("The body must be a JSON object or empty.")
        session = await self._store.create(options)
        base = str(request.base_url).rstrip("/")
        return json_response(
            {"id": session.id, "object": "session", "base_url": f"{base}/sessions/{session.id}/v1"}, 201
        )

    async def show(self, request: Request) -> Response:
        return json_response(session_json(self._session(request)))

    async def end(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        if not await self._store.end(session_id):
            raise _unknown(session_id)
        return json_response({"id": session_id, "object": "session.deleted", "deleted": True})

    async def chat(self, request: Request) -> ASGIApp:
        session = self._session(request)
        body = await self._chat_body(request)

        async def answer(on_delta: OnDelta) -> ChatReply:
            return await session.chat(body.request, on_delta)

        return await self._reply(request, body, answer)

    async def chat_once(self, request: Request) -> ASGIApp:
        """A session of one turn."""
        body = await self._chat_body(request)

        async def answer(on_delta: OnDelta) -> ChatReply:
            session = await self._store.create({})
            try:
                return await session.chat(body.request, on_delta)
            finally:
                await self._store.end(session.id)

        return await self._reply(request, body, answer)

    async def _reply(self, request: Request, body: ChatBody, answer: Answer) -> ASGIApp:
        completion = Completion(self._store.model, self._store.tokenizer, body.logprobs)
        if body.stream:
            return EventStream(answer, completion, body.include_usage, self._limits.send_timeout_s, error_response)
        return json_response(completion.whole(await unless_gone(request.receive, answer(None))))

    async def _chat_body(self, request: Request) -> ChatBody:
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        return chat_body(decoded(await read_body(request, self._limits)), retry)

    def _session(self, request: Request) -> Session:
        session_id = request.path_params["session_id"]
        if (session := self._store.find(session_id)) is None:
            raise _unknown(session_id)
        return session


def _unknown(session_id: str) -> FailureError:
    return FailureError(HTTPStatus.NOT_FOUND, f"There is no session {session_id[:64]}.", "session_not_found")


async def read_body(request: Request, limits: EndpointLimits) -> bytes:
    """The whole body. FailureError 413 above the limit, 408 if it takes too long.

    What is somewhat too large is read to its end and forgotten: a client that is still sending would not see the answer.
    """
    most = limits.max_body_bytes
    too_large = FailureError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is larger than {most} bytes.", "request_too_large"
    )
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > READ_OFF * most:
        raise too_large
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in _parts(request):
                size += len(part)
                if size > READ_OFF * most:
                    raise too_large
                body += part if size <= most else b""
    except TimeoutError:
        raise FailureError(HTTPStatus.REQUEST_TIMEOUT, "The body did not arrive in time.", "request_timeout") from None
    if size > most:
        raise too_large
    return bytes(body)


async def _parts(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors and bad UTF-8 are ValueErrors
        raise RefusedRequestError(f"The body is not JSON: {error}.", None, "invalid_json") from error


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def error_response(failure: Failure) -> Response:
    response = json_response(failure.body(), failure.status)
    if failure.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    if failure.status == HTTPStatus.REQUEST_TIMEOUT:
        response.headers["connection"] = "close"  # the rest of the body may still come
    return response


def _on_failure(request: Request, error: FailureError) -> Response:
    return error_response(error.failure)


def _on_session_error(request: Request, error: Exception) -> Response:
    return error_response(failure_of(error) or BROKEN)


def _on_http_exception(request: Request, error: HTTPException) -> Response:
    response = error_response(Failure(error.status_code, f"{request.method} {request.url.path}: {error.detail}."))
    response.headers.update(error.headers or {})
    return response


def _on_anything(request: Request, error: Exception) -> Response:
    """Starlette raises it again behind this response, for the server's log."""
    return error_response(BROKEN)
