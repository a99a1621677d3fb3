"""One session: turns of one trajectory, one at a time, each captured whole or not at all. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from psrl.protocol.generation import FINISH_STOP
from psrl.protocol.samples import VersionSpan
from psrl.sessions.capture import SessionCapture, TurnStart
from psrl.sessions.errors import (
    ContextExceededError,
    RefusedRequestError,
    SessionBusyError,
    TurnLimitError,
    TurnTimeoutError,
)
from psrl.sessions.messages import Message
from psrl.sessions.text import TurnText
from psrl.sessions.tool_calls import OPEN
from psrl.sessions.turns import SessionOverError, TurnMaker, TurnRequest, TurnTokens

log = logging.getLogger(__name__)
ABORT_S = 30.0
"""A maker that has not ended a cancelled turn after so long is given up, and its session with it."""
NOT_OURS = (RefusedRequestError, SessionOverError)
"""The request is at fault, or the trajectory was ended. A client that leaves cancels its turn, which is its own doing too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    max_turns: int = 256
    """Most finished turns of a session."""
    turn_timeout_s: float = 1800.0
    """Longest time from the beginning of a turn to its last token, waiting for an instance included."""
    queue_timeout_s: float = 600.0
    """Longest wait for another turn of the same session to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What an agent asks. `temperature`, `top_p` and `seed` None: as the run samples."""

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    max_tokens: int | None = None
    """None: as many as there is room for."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the turn. The tokens up to the one that completes the string are kept, the text ends before it."""
    retry: bool = False
    """The client says that it repeats a request: if the newest turn answers just this one, that answer is given again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """`message` in OpenAI's shape; `finish_reason` "stop", "length" or "tool_calls"."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of a turn that is being written; `text` may be empty while it is not certain to stay."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class _Hearing:
    """Collects a turn while it is made, up to a stop string, and tells it on."""

    text: TurnText
    on_delta: Callable[[Delta], None] | None
    stop: Callable[[], Any] = lambda: None
    tokens: TurnTokens = field(default_factory=TurnTokens)

    def hear(self, part: TurnTokens) -> None:
        if self.text.stopped:
            return
        count = next((n for n, token in enumerate(part.token_ids, 1) if self.text.add(token)), len(part.token_ids))
        had = len(self.tokens.token_ids)
        self.tokens.token_ids += part.token_ids[:count]
        self.tokens.logprobs += part.logprobs[:count]
        cut = (VersionSpan(s.start, min(s.end, had + count), s.version) for s in part.spans)
        self.tokens.spans += [span for span in cut if span.end > span.start]
        self.tokens.finish = FINISH_STOP if self.text.stopped else part.finish
        if self.on_delta is not None and count:
            self.on_delta(Delta(self.text.fresh(), part.token_ids[:count], part.logprobs[:count]))
        if self.text.stopped:
            self.stop()

    def hear_rest(self, whole: TurnTokens) -> None:
        """The turn as it ended; what was heard of it in parts is not heard again. ValueError if it is not how it began."""
        had = len(self.tokens.token_ids)
        if whole.token_ids[:had] != self.tokens.token_ids:
            raise ValueError("a turn ended with other tokens than it was told in parts")
        spans = [VersionSpan(max(s.start, had), s.end, s.version) for s in whole.spans if s.end > had]
        self.hear(TurnTokens(whole.token_ids[had:], whole.logprobs[had:], spans, whole.finish))
        if not self.text.stopped and self.text.end():
            self.tokens.finish = FINISH_STOP


class Session:
    """Turns one at a time, with deadlines; whatever goes wrong in a turn, the capture holds finished turns only."""

    def __init__(self, session_id: str, capture: SessionCapture, maker: TurnMaker, limits: SessionLimits | None = None):
        self.id = session_id
        self.capture = capture
        self.limits = limits or SessionLimits()
        self.over = ""
        """Why no further turn is taken; "" while there may be one."""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        """Of all turns."""
        self.failed_turns = 0
        self.fault = ""
        """Why a turn failed through no fault of the agent's, if none has been made since. It may have been told an error and have gone on
        as if the model had said nothing."""
        self._maker = maker
        self._lock = asyncio.Lock()
        self._making: asyncio.Task[TurnTokens] | None = None
        self._last: tuple[bytes, ChatReply] | None = None
        """The newest reply and the history that it answers, unless another attempt has been made since."""

    async def chat(self, request: ChatRequest, on_delta: Callable[[Delta], None] | None = None) -> ChatReply:
        """The next turn; `on_delta` hears it while it is being written. Cancelling this aborts the turn.

        Raises RefusedRequestError and its kinds, SessionOverError, SessionBusyError, TurnTimeoutError.
        """
        async with self._one_at_a_time():
            try:
                reply = await self._chat(request, on_delta)
            except NOT_OURS:
                raise
            except Exception as error:
                self.fault = f"{type(error).__name__}: {error}"
                raise
            self.fault = ""
            return reply

    async def _chat(self, request: ChatRequest, on_delta: Callable[[Delta], None] | None) -> ChatReply:
        start = self.capture.begin_turn(request.messages, request.tools)
        if request.retry and self._last is not None and self._last[0] == start.history:
            return self._last[1]
        self._last = None
        turn = self._turn_request(request, start)
        hearing = _Hearing(TurnText(self.capture.tokenizer, request.stop, OPEN if request.tools else ""), on_delta)
        try:
            await self._make(turn, hearing)
        except BaseException:
            self.failed_turns += 1
            raise
        reply = self._keep(start, hearing)
        self._last = start.history, reply
        return reply

    @asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.limits.queue_timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            waited = self.limits.queue_timeout_s
            raise SessionBusyError(f"Session {self.id} was busy with another turn for {waited:g} s.") from None
        try:
            if self.over:
                raise SessionOverError(self.over)
            yield
        finally:
            self._lock.release()

    def _turn_request(self, request: ChatRequest, start: TurnStart) -> TurnRequest:
        if self.capture.num_turns >= self.limits.max_turns:
            raise TurnLimitError(f"Session {self.id} has had all of its {self.limits.max_turns} turns.")
        room = self._maker.room(len(start.prompt_ids))
        if room <= 0:
            raise ContextExceededError(
                f"The conversation has {len(start.prompt_ids)} tokens, which leaves no room for a further one."
            )
        return TurnRequest(
            prompt_ids=start.prompt_ids,
            max_new_tokens=min(room, request.max_tokens or room),
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            num_before=self.capture.num_turns,
        )

    async def _make(self, turn: TurnRequest, hearing: _Hearing) -> None:
        """Fills `hearing` with the whole turn, or raises."""
        making = self._making = asyncio.create_task(self._maker.turn(turn, hearing.hear))
        hearing.stop = making.cancel
        try:
            await asyncio.wait({making}, timeout=self.limits.turn_timeout_s)
            in_time = making.done()
        finally:
            self._making = None
            await self._abort(making)
        failure = None if making.cancelled() or not making.done() else making.exception()
        if hearing.text.stopped:
            return
        if not in_time:
            raise TurnTimeoutError(f"The turn did not end within {self.limits.turn_timeout_s:g} s.")
        if making.cancelled():
            raise SessionOverError(self.over or "the generation was aborted")
        if failure is not None:
            self.over = str(failure) if isinstance(failure, SessionOverError) else self.over
            raise failure
        hearing.hear_rest(making.result())

    async def _abort(self, making: asyncio.Task[TurnTokens]) -> None:
        if making.done():
            return
        making.cancel()
        await asyncio.wait({making}, timeout=ABORT_S)
        if not making.done():
            self.over = f"a cancelled turn did not end within {ABORT_S:g} s"
            log.error("session %s is given up: %s", self.id, self.over)

    def _keep(self, start: TurnStart, hearing: _Hearing) -> ChatReply:
        ended = self.capture.end_turn(start, hearing.tokens, hearing.text.text)
        self.prompt_tokens += len(start.prompt_ids)
        self.completion_tokens += len(hearing.tokens.token_ids)
        return ChatReply(
            message=ended.message,
            finish_reason=ended.finish_reason,
            prompt_tokens=len(start.prompt_ids),
            token_ids=ended.turn.token_ids,
            logprobs=ended.turn.logprobs,
        )

    async def close(self, reason: str = "the session has been ended") -> None:
        """Take no further turn and abort the one that is being made. Returns when it is gone, or after a deadline."""
        self.over = self.over or reason
        if self._making is not None:
            self._making.cancel()
        try:
            async with asyncio.timeout(2 * ABORT_S):
                async with self._lock:
                    pass
        except TimeoutError:
            log.error("session %s: its last turn did not end within %g s", self.id, 2 * ABORT_S)

    @property
    def busy(self) -> bool:
        return self._lock.locked()
