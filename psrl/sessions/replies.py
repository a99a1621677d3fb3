"""OpenAI's JSON: completions, chunks of streamed ones, log-probs, errors; and the state of a session."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from psrl.models.tokenizer import ChatTokenizer
from psrl.sessions.errors import (
    RefusedRequestError,
    SessionBusyError,
    TooManySessionsError,
    TurnTimeoutError,
)
from psrl.sessions.session import ChatReply, Session
from psrl.sessions.turns import SessionOverError, TrainingArrays

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion in the making; its id and time are the same in all of its chunks."""

    model: str
    tokenizer: ChatTokenizer
    logprobs: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, reply: ChatReply) -> Json:
        choice = {
            "index": 0,
            "message": reply.message | {"refusal": None},
            "finish_reason": reply.finish_reason,
            "logprobs": self._logprobs(reply.token_ids, reply.logprobs),
        }
        return self._object("chat.completion", [choice]) | {"usage": usage(reply)}

    def chunk(
        self,
        delta: Json,
        finish_reason: str | None = None,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
    ) -> Json:
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": self._logprobs(token_ids, logprobs),
        }
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self, reply: ChatReply) -> Json:
        return self._object("chat.completion.chunk", []) | {"usage": usage(reply)}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> Json | None:
        if not self.logprobs:
            return None
        texts = self.tokenizer.decode_batch([[token] for token in token_ids], skip_special_tokens=False)
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ],
            "refusal": None,
        }


def _bytes(text: str) -> list[int] | None:
    """None where a token is only a part of a character: its text does not say which."""
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())


def call_deltas(calls: Sequence[Json]) -> list[Json]:
    """Tool calls as a chunk says them."""
    return [{"index": i} | call for i, call in enumerate(calls)]


def usage(reply: ChatReply) -> Json:
    made = len(reply.token_ids)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": reply.prompt_tokens + made,
    }


def model_json(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "psrl"}


def session_json(session: Session) -> Json:
    """What there is to say of a session, all branches as training arrays; `trained_branch` is the one that trains."""
    branches, newest = session.capture.branches(), session.capture.trained_branch()
    return {
        "id": session.id,
        "object": "session",
        "state": "over" if session.over else "busy" if session.busy else "idle",
        "reason": session.over,
        "turns": session.capture.num_turns,
        "failed_turns": session.failed_turns,
        "prompt_tokens": session.prompt_tokens,
        "completion_tokens": session.completion_tokens,
        "trained_branch": next((i for i, branch in enumerate(branches) if branch is newest), None),
        "branches": [arrays_json(session.capture.arrays(branch)) for branch in branches],
    }


def arrays_json(arrays: TrainingArrays) -> Json:
    return asdict(arrays) | {"spans": [[span.start, span.end, span.version] for span in arrays.spans]}


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP status and what is said with it. `param` and `code` as in the official API."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None

    def body(self) -> Json:
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


MAY_COME_AGAIN = {
    SessionBusyError: (HTTPStatus.TOO_MANY_REQUESTS, "session_busy"),
    TooManySessionsError: (HTTPStatus.SERVICE_UNAVAILABLE, "too_many_sessions"),
    TurnTimeoutError: (HTTPStatus.GATEWAY_TIMEOUT, "turn_timeout"),
}
"""Clients try these again by themselves. A session that is over is 410, which they do not."""


def failure_of(error: Exception) -> Failure | None:
    """None for what is nobody's doing but ours."""
    if isinstance(error, RefusedRequestError):
        return Failure(HTTPStatus.BAD_REQUEST, str(error), error.code, error.param)
    if isinstance(error, SessionOverError):
        return Failure(HTTPStatus.GONE, f"The session takes no further turn: {error}.", "session_over")
    if type(error) in MAY_COME_AGAIN:
        status, code = MAY_COME_AGAIN[type(error)]
        return Failure(status, str(error), code)
    return None
