"""A session: one turn at a time, within its limits, and captured whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from session_parts import ADD, END, NEVER, THINKING, ScriptedMaker, call_text, chat_tokenizer, user

from psrl.models.tokenizer import ChatTokenizer
from psrl.sessions.capture import SessionCapture
from psrl.sessions.errors import (
    ContextExceededError,
    RefusedRequestError,
    SessionBusyError,
    TurnLimitError,
    TurnTimeoutError,
)
from psrl.sessions.session import ChatRequest, Delta, Session, SessionLimits
from psrl.sessions.turns import SessionOverError

pytestmark = pytest.mark.unit
DEADLINE_S = 60


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return chat_tokenizer(directory, THINKING)


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))  # type: ignore[arg-type]


def new_session(tokenizer: ChatTokenizer, maker: ScriptedMaker, **limits: Any) -> Session:
    return Session("s", SessionCapture(tokenizer), maker, SessionLimits(**limits))


def ask(*texts: str, **settings: Any) -> ChatRequest:
    return ChatRequest(messages=[user(text) for text in texts], **settings)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_turn_asks_for_what_there_is_room_for_and_is_told_as_it_is_written(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        ids = [*tokenizer.encode("So it is 日 here"), END]
        maker = ScriptedMaker([ids, ids, ids], room=lambda prompt: 50 - prompt)
        session = new_session(tokenizer, maker)
        told: list[Delta] = []
        reply = await session.chat(ask("Hi", temperature=0.5, top_p=0.9, seed=7), told.append)
        assert reply.message == {"role": "assistant", "content": "So it is 日 here"} and reply.finish_reason == "stop"
        assert "".join(d.text for d in told) == "So it is 日 here" and len(told) == len(ids)
        assert [i for d in told for i in d.token_ids] == list(reply.token_ids) == ids
        assert [p for d in told for p in d.logprobs] == list(reply.logprobs) == maker.made[0].logprobs
        (request,) = maker.requests
        assert request.max_new_tokens == 50 - len(request.prompt_ids) and request.prompt_ids == tuple(
            tokenizer.encode_chat([user("Hi")])
        )
        assert (request.temperature, request.top_p, request.seed) == (0.5, 0.9, 7)

        reply = await session.chat(ask("Ho", max_tokens=2))
        assert (list(reply.token_ids), reply.finish_reason) == (ids[:2], "length")
        with pytest.raises(ContextExceededError, match="leaves no room"):
            await session.chat(ask("very long " * 20))
        assert (session.capture.num_turns, session.completion_tokens) == (2, len(ids) + 2)

    run(scenario)


@pytest.mark.parametrize("part", [1, 3, 100])
def test_a_stop_string_ends_the_turn_at_the_token_that_completes_it(tokenizer: ChatTokenizer, part: int) -> None:
    async def scenario() -> None:
        ids = [*tokenizer.encode("a STOP b STOP"), END]
        maker = ScriptedMaker([ids], part=part)
        session = new_session(tokenizer, maker)
        told: list[Delta] = []
        reply = await session.chat(ask("Hi", stop=("STOP", "b")), told.append)
        assert reply.message["content"] == "a " and reply.finish_reason == "stop"
        kept = len(tokenizer.encode("a STOP"))
        assert list(reply.token_ids) == ids[:kept] and "".join(d.text for d in told) == "a "
        assert maker.running == 0 and (maker.cancelled == 1 or part == 100)
        newest = session.capture.trained_branch()
        assert newest is not None
        sample = session.capture.arrays(newest)
        assert sample.response_ids == ids[:kept] and [(s.start, s.end) for s in sample.spans] == [(0, kept)]
        again = session.capture.begin_turn([user("Hi"), reply.message, user("More")])
        assert again.parent is newest and again.added_ids[0] == END  # the model has not ended its turn: the glue does

    run(scenario)


def test_a_stop_string_is_found_in_tokens_that_were_never_told_in_parts(tokenizer: ChatTokenizer) -> None:
    class Quiet(ScriptedMaker):
        async def turn(self, request: Any, on_tokens: Any = None) -> Any:
            return await super().turn(request, None)

    async def scenario() -> None:
        maker = Quiet([[*tokenizer.encode("a STOP b"), END]])
        reply = await new_session(tokenizer, maker).chat(ask("Hi", stop=("STOP",)))
        assert list(reply.token_ids) == tokenizer.encode("a STOP") and reply.message["content"] == "a "

    run(scenario)


def test_calls_are_told_at_the_end_only(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        texts = ["So " + call_text("add", a=1), "So <tool_call>{ never"]
        maker = ScriptedMaker([[*tokenizer.encode(text), END] for text in texts])
        session = new_session(tokenizer, maker)
        for text, reason in zip(texts, ("tool_calls", "stop"), strict=True):
            told: list[Delta] = []
            reply = await session.chat(ask("Hi", tools=[ADD]), told.append)
            assert "".join(d.text for d in told) == "So " and reply.finish_reason == reason
            assert reply.message["content"] == ("So " if reason == "tool_calls" else text)
        assert len(session.capture.branches()) == 2

    run(scenario)


def test_turns_of_one_session_follow_one_another(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        maker = ScriptedMaker([[5, END], [6, END]])
        maker.go_on.clear()
        session = new_session(tokenizer, maker, queue_timeout_s=DEADLINE_S)
        first, second = (asyncio.create_task(session.chat(ask(text))) for text in "ab")
        await until(lambda: maker.running == 1)
        await asyncio.sleep(0)
        assert session.busy and len(maker.requests) == 1
        maker.go_on.set()
        assert [list((await turn).token_ids) for turn in (first, second)] == [[5, END], [6, END]]
        assert not session.busy

    run(scenario)


def test_who_waits_too_long_is_told_to_come_again(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        maker = ScriptedMaker([[NEVER], [5, END]])
        session = new_session(tokenizer, maker, queue_timeout_s=0.01)
        first = asyncio.create_task(session.chat(ask("a")))
        await until(lambda: maker.running == 1)
        with pytest.raises(SessionBusyError, match="busy with another turn"):
            await session.chat(ask("b"))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert list((await session.chat(ask("b"))).token_ids) == [5, END]

    run(scenario)


async def cancel(session: Session, maker: ScriptedMaker) -> None:
    turn = asyncio.create_task(session.chat(ask("Hi")))
    await until(lambda: maker.running == 1)
    turn.cancel()
    await turn


async def wait(session: Session, maker: ScriptedMaker) -> None:
    session.limits = replace(session.limits, turn_timeout_s=0.01)
    try:
        await session.chat(ask("Hi"))
    finally:
        session.limits = SessionLimits()


async def ask_only(session: Session, maker: ScriptedMaker) -> None:
    await session.chat(ask("Hi"))


FAILURES = [
    ([5, NEVER], cancel, asyncio.CancelledError),
    ([5, NEVER], wait, TurnTimeoutError),
    (OSError("no instance"), ask_only, OSError),
]


@pytest.mark.parametrize(("entry", "fail", "error"), FAILURES)
def test_a_turn_that_fails_leaves_no_trace(
    tokenizer: ChatTokenizer, entry: Any, fail: Any, error: type[BaseException]
) -> None:
    async def scenario() -> None:
        maker = ScriptedMaker([[5, END], entry, [6, END]])
        session = new_session(tokenizer, maker)
        first = await session.chat(ask("Hi"))
        with pytest.raises(error):
            await fail(session, maker)
        assert (session.failed_turns, session.capture.num_turns, maker.running, session.busy) == (1, 1, 0, False)
        await session.chat(ChatRequest(messages=[user("Hi"), first.message, user("More")]))
        (branch,) = session.capture.branches()
        sample = session.capture.arrays(branch)
        assert sample.prompt_ids + sample.response_ids == [*maker.requests[-1].prompt_ids, 6, END]

    run(scenario)


def test_a_fault_of_ours_is_known_until_a_turn_makes_up_for_it(tokenizer: ChatTokenizer) -> None:
    """Whoever asked may swallow the error: what it makes of the conversation then is not for the model to answer for."""

    async def scenario() -> None:
        maker = ScriptedMaker(
            [OSError("down"), [5, END], [5, NEVER], [5, NEVER], SessionOverError("its group was dropped")]
        )
        session = new_session(tokenizer, maker, max_turns=5)
        with pytest.raises(OSError, match="down"):
            await session.chat(ask("a"))
        assert session.fault == "OSError: down"
        with pytest.raises(RefusedRequestError):
            await session.chat(ask())
        assert session.fault == "OSError: down"  # a request that is refused makes up for nothing
        await session.chat(ask("a"))
        assert session.fault == ""
        with pytest.raises(RefusedRequestError):
            await session.chat(ask())
        with pytest.raises(asyncio.CancelledError):
            await cancel(session, maker)
        assert session.fault == "" and session.failed_turns == 2  # refused, or given up by its client: not ours
        with pytest.raises(TurnTimeoutError):
            await wait(session, maker)
        assert session.fault == "TurnTimeoutError: The turn did not end within 0.01 s."
        with pytest.raises(SessionOverError):
            await session.chat(ask("a"))
        assert session.fault.startswith("TurnTimeoutError")

    run(scenario)


def test_a_turn_knows_how_many_were_kept_before_it(tokenizer: ChatTokenizer) -> None:
    """One that a stop string ended was kept, though its maker was cancelled; one that failed was not."""

    async def scenario() -> None:
        stopped = [*tokenizer.encode("a STOP b"), END]
        maker = ScriptedMaker([stopped, OSError("down"), [5, END], [6, END]], part=1)
        session = new_session(tokenizer, maker)
        await session.chat(ask("Hi", stop=("STOP",)))
        with pytest.raises(OSError, match="down"):
            await session.chat(ask("Hi"))
        for _ in range(2):
            await session.chat(ask("Hi"))
        assert [request.num_before for request in maker.requests] == [0, 1, 1, 2]

    run(scenario)


def test_a_repeated_request_gets_the_same_answer_only_if_it_says_so(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        maker = ScriptedMaker([[5, END], [6, END], OSError("down"), [7, END]])
        session = new_session(tokenizer, maker)
        first = await session.chat(ask("a"))
        assert await session.chat(ask("a", retry=True)) is first
        assert list((await session.chat(ask("a"))).token_ids) == [6, END]  # a second sample of it
        with pytest.raises(OSError, match="down"):
            await session.chat(ask("a"))
        assert list((await session.chat(ask("a", retry=True))).token_ids) == [
            7,
            END,
        ]  # what is retried is the failed one
        assert len(session.capture.branches()) == session.capture.num_turns == 3

    run(scenario)


def test_a_maker_that_takes_back_what_it_told_is_not_believed(tokenizer: ChatTokenizer) -> None:
    class Fickle(ScriptedMaker):
        async def turn(self, request: Any, on_tokens: Any = None) -> Any:
            whole = await super().turn(request, on_tokens)
            whole.token_ids[0] += 1
            return whole

    async def scenario() -> None:
        session = new_session(tokenizer, Fickle([[5, END]]))
        with pytest.raises(ValueError, match="other tokens than it was told"):
            await session.chat(ask("a"))
        assert session.capture.num_turns == 0

    run(scenario)


def test_a_session_that_is_closed_aborts_its_turn_and_takes_none(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        maker = ScriptedMaker([[NEVER]])
        session = new_session(tokenizer, maker)
        turns = [asyncio.create_task(session.chat(ask("a"))) for _ in range(3)]
        await until(lambda: maker.running == 1)
        await session.close("the run ends")
        for turn in turns:
            with pytest.raises(SessionOverError, match="the run ends"):
                await turn
        assert (maker.cancelled, maker.running, len(maker.requests), session.capture.num_turns) == (1, 0, 1, 0)
        with pytest.raises(SessionOverError, match="the run ends"):
            await session.chat(ask("a"))

    run(scenario)


def test_what_the_maker_calls_over_is_over(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        session = new_session(tokenizer, ScriptedMaker([SessionOverError("its group was dropped"), [5, END]]))
        for _ in range(2):
            with pytest.raises(SessionOverError, match="its group was dropped"):
                await session.chat(ask("a"))

    run(scenario)


def test_limits_and_malformed_requests_are_refused_before_anything_is_made(tokenizer: ChatTokenizer) -> None:
    async def scenario() -> None:
        maker = ScriptedMaker([[5, END]])
        session = new_session(tokenizer, maker, max_turns=1)
        with pytest.raises(RefusedRequestError, match="is empty"):
            await session.chat(ask())
        await session.chat(ask("a"))
        with pytest.raises(TurnLimitError, match="all of its 1 turns"):
            await session.chat(ask("a"))
        assert len(maker.requests) == 1

    run(scenario)
