"""Keys that limit sessions reach what keeps to them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from session_parts import END, THINKING, ScriptedMaker, chat_tokenizer

from psrl.config.agents import AgentConfig, MultiTurnConfig
from psrl.rollout.session_agents import make_server, session_limits
from psrl.sessions.session import SessionLimits
from psrl.sessions.store import MemoryStore

pytestmark = pytest.mark.unit


def test_limits_are_those_of_the_run() -> None:
    assert session_limits(AgentConfig(), MultiTurnConfig()) == SessionLimits()
    asked = session_limits(AgentConfig(turn_timeout_s=90.0), MultiTurnConfig(max_assistant_turns=3))
    assert (asked.turn_timeout_s, asked.max_turns) == (90.0, 3)
    assert session_limits(AgentConfig(turn_timeout_s=90.0), MultiTurnConfig()).max_turns == SessionLimits().max_turns


async def status_of(app: Any, body: bytes) -> int:
    """Of a POST of this body that asks for one turn."""
    headers = [(b"authorization", b"Bearer key"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b"",
        "scheme": "http", "server": ("127.0.0.1", 1), "root_path": "", "http_version": "1.1",
    }  # fmt: skip
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    said: list[Any] = []

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        said.append(message)

    await app(scope, receive, send)
    return said[0]["status"]


@pytest.mark.parametrize(("max_body_mb", "status"), [(0.001, 413), (0.01, 200)])
def test_a_body_may_be_as_large_as_the_run_says(tmp_path, max_body_mb: float, status: int) -> None:
    tokenizer = chat_tokenizer(tmp_path, THINKING)
    store = MemoryStore("tiny", tokenizer, lambda _: ScriptedMaker([[5, END]]))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "user": "x" * 2000}).encode()

    async def scenario() -> None:
        server = make_server(store, "key", "127.0.0.1", AgentConfig(max_body_mb=max_body_mb))
        try:
            assert await status_of(server._config.app, body) == status
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))
