"""A session without a model: it says what a script says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from psrl.sessions.session import ChatReply, ChatRequest
from psrl.tasks.base import PreparedPrompt

Turn = str | dict[str, Any] | Exception | tuple[str, str]


class ScriptedSession:
    """Each turn is a text, a message, (text, finish reason), or an exception to raise; `asked` keeps the requests."""

    id = "s1"

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)
        self.asked: list[ChatRequest] = []

    async def chat(self, request: ChatRequest, on_delta: Any = None) -> ChatReply:
        self.asked.append(request)
        await asyncio.sleep(0)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        text, finish = turn if isinstance(turn, tuple) else (turn, "stop")
        message = text if isinstance(text, dict) else {"role": "assistant", "content": text}
        reason = "tool_calls" if message.get("tool_calls") else finish
        return ChatReply(message=message, finish_reason=reason, prompt_tokens=0, token_ids=(), logprobs=())


def tool_call(name: str, arguments: str, call_id: str = "c0") -> dict[str, Any]:
    """An assistant message that calls one tool."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def prompt_of(text: str = "How much?", **fields: Any) -> PreparedPrompt:
    return PreparedPrompt(
        index=3, prompt_ids=b"", data_source="test", messages=[{"role": "user", "content": text}], **fields
    )
