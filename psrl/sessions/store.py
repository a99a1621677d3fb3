"""Which sessions there are: what the endpoint asks of its owner, and the plain answer to it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

from psrl.models.tokenizer import ChatTokenizer
from psrl.sessions.capture import SessionCapture
from psrl.sessions.errors import RefusedRequestError, TooManySessionsError
from psrl.sessions.session import Session, SessionLimits
from psrl.sessions.turns import TurnMaker


class SessionStore(Protocol):
    """Creates, finds and ends sessions."""

    model: str
    """The name that clients are told."""
    tokenizer: ChatTokenizer

    async def create(self, options: dict[str, Any]) -> Session:
        """A new session; `options` is the body of the request. RefusedRequestError, TooManySessionsError."""
        ...

    def find(self, session_id: str) -> Session | None:
        """None if it never was or has been ended."""
        ...

    async def end(self, session_id: str) -> bool:
        """Aborts its turn if there is one and forgets it. False if there is no such session."""
        ...


class MemoryStore:
    """Sessions by a random id, for whoever knows the run's token; each asks `make_maker(session_id)` for its maker."""

    def __init__(
        self,
        model: str,
        tokenizer: ChatTokenizer,
        make_maker: Callable[[str], TurnMaker],
        limits: SessionLimits | None = None,
        max_sessions: int = 4096,
    ):
        self.model = model
        self.sessions: dict[str, Session] = {}
        self.tokenizer = tokenizer
        self._make_maker = make_maker
        self._limits = limits
        self._max_sessions = max_sessions

    async def create(self, options: dict[str, Any]) -> Session:
        if options:
            raise RefusedRequestError(
                f"A session takes no {', '.join(options)}: send an empty object.", next(iter(options))
            )
        if len(self.sessions) >= self._max_sessions:
            raise TooManySessionsError(f"There are {self._max_sessions} sessions already: end one or try again later.")
        session_id = secrets.token_hex(12)
        session = Session(session_id, SessionCapture(self.tokenizer), self._make_maker(session_id), self._limits)
        self.sessions[session_id] = session
        return session

    def find(self, session_id: str) -> Session | None:
        return self.sessions.get(session_id)

    async def end(self, session_id: str) -> bool:
        session = self.sessions.pop(session_id, None)
        if session is not None:
            await session.close()
        return session is not None
