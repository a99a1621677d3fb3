"""The native multi-turn loop: turns, ends, deadlines, retries; a trajectory that failed has no reward."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from agent_sessions import ScriptedSession, Turn, prompt_of

from psrl.agents import environment_calls
from psrl.agents.base import Ending
from psrl.agents.environment import BaseEnvironment, EnvironmentRetryError, Step
from psrl.agents.multi_turn import ToolAgent, TurnLimits
from psrl.sessions.errors import ContextExceededError, RefusedRequestError, TurnLimitError, TurnTimeoutError
from psrl.sessions.turns import SessionOverError

pytestmark = pytest.mark.unit


class Counting(BaseEnvironment):
    """Says "next" until it has heard `turns` messages; each is worth `worth`."""

    def __init__(self, turns: int = 2, worth: Any = None, total: Any = None) -> None:
        self.turns, self.worth, self.total = turns, worth, total
        self.heard: list[str] = []
        self.closed = 0

    async def step(self, message: dict[str, Any]) -> Step:
        self.heard.append(message["content"])
        done = len(self.heard) == self.turns
        return Step([{"role": "user", "content": "next"}], done, self.worth, {"heard": len(self.heard)})

    async def score(self) -> Any:
        return self.total

    async def close(self) -> None:
        self.closed += 1


def play(environment: Any, turns: list[Turn], **limits: Any) -> tuple[Ending, ScriptedSession]:
    session = ScriptedSession(turns)
    agent = ToolAgent(lambda: environment, TurnLimits(**limits))
    return asyncio.run(agent.run(session, prompt_of())), session


def test_the_conversation_grows_by_what_both_said() -> None:
    environment = Counting(turns=2)
    ending, session = play(environment, ["one", "two"])
    assert ending == Ending(None, {"heard": 2.0, "environment_retries": 0.0, "assistant_turns": 2.0})
    said = [[(m["role"], m["content"]) for m in request.messages] for request in session.asked]
    assert said == [
        [("user", "How much?")],
        [("user", "How much?"), ("assistant", "one"), ("user", "next")],
    ]
    assert environment.closed == 1


@pytest.mark.parametrize(
    ("worth", "total", "reward"),
    [(None, None, None), (0.25, None, 0.5), (None, 1, 1.0), (0.25, -1.0, -0.5), (0, None, 0.0), (True, None, 2.0)],
)
def test_rewards_add_up_and_none_leaves_it_to_the_verifier(worth: Any, total: Any, reward: float | None) -> None:
    ending, _ = play(Counting(2, worth, total), ["one", "two"])
    assert (ending.reward, ending.failed) == (reward, "")


@pytest.mark.parametrize(
    ("turns", "limits", "heard"),
    [
        (["one", ("tw", "length")], {}, ["one"]),
        (["one", ContextExceededError("full")], {}, ["one"]),
        (["one", TurnLimitError("enough")], {}, ["one"]),
        (["one", "two"], {"max_assistant_turns": 2}, ["one", "two"]),
        ([ContextExceededError("full")], {}, []),
    ],
)
def test_a_trajectory_that_is_cut_short_ends_and_is_scored(turns: list[Turn], limits: dict, heard: list[str]) -> None:
    environment = Counting(turns=9, total=0.75)
    ending, session = play(environment, turns, **limits)
    assert (ending.reward, ending.failed, environment.heard) == (0.75, "", heard)
    assert environment.closed == 1 and not session.turns


def test_a_cut_message_may_be_answered_like_a_whole_one() -> None:
    environment = Counting(turns=9, total=0.75)
    turns: list[Turn] = [("on", "length"), ("tw", "length"), ContextExceededError("full")]
    ending, _ = play(environment, turns, max_tokens_per_turn=2, go_on_after_cut=True)
    assert (ending.reward, ending.failed, environment.heard) == (0.75, "", ["on", "tw"])


def test_a_turns_tokens_are_limited() -> None:
    _, session = play(Counting(1), ["one"], max_tokens_per_turn=7)
    assert [request.max_tokens for request in session.asked] == [7]


class Faulty(Counting):
    """Does `fault` in the method `where`."""

    def __init__(self, where: str, fault: Callable[[], Any]) -> None:
        super().__init__(turns=2, worth=1.0)
        self.fault = fault
        inner = getattr(self, where)

        async def faulty(*arguments: Any) -> Any:
            result = self.fault()
            if asyncio.iscoroutine(result):
                result = await result
            return await inner(*arguments) if result is None else result

        setattr(self, where, faulty)


def raising(error: BaseException) -> Callable[[], Any]:
    def fault() -> None:
        raise error

    return fault


@pytest.mark.parametrize("where", ["reset", "step", "score"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (raising(ValueError("no\nsuch place")), "raised ValueError: no such place"),
        (raising(TimeoutError("its own")), "raised TimeoutError: its own"),
        (raising(KeyError("x")), "raised KeyError: 'x'"),
        (lambda: asyncio.sleep(60), "no answer to {where} within multi_turn.step_timeout_s=0.05"),
        (raising(EnvironmentRetryError("busy")), "{where} was tried 3 times (multi_turn.max_env_retries=2): busy"),
    ],
)
def test_a_fault_of_the_environment_fails_the_trajectory_and_earns_nothing(
    where: str, fault: Callable[[], Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_calls, "PAUSE_S", 0.0)
    environment = Faulty(where, fault)
    ending, _ = play(environment, ["one", "two"], step_timeout_s=0.05, max_env_retries=2)
    assert ending.reward is None and ending.metrics == {}
    assert ending.failed.startswith("environment: ") and said.format(where=where) in ending.failed
    assert environment.closed == 1


@pytest.mark.parametrize(
    ("where", "wrong"),
    [("reset", []), ("reset", "hello"), ("reset", [1]), ("step", {"done": True}), ("score", math.nan), ("score", "1")],
)
def test_what_is_no_answer_fails_the_trajectory(where: str, wrong: Any) -> None:
    environment = Faulty(where, lambda: wrong)
    ending, _ = play(environment, ["one", "two"])
    assert ending.reward is None and ending.failed.startswith("environment: ") and environment.closed == 1


@pytest.mark.parametrize("worth", [math.nan, math.inf, "1"])
def test_a_step_worth_no_finite_number_fails_the_trajectory(worth: Any) -> None:
    ending, _ = play(Counting(2, worth), ["one", "two"])
    assert ending.reward is None and "the reward" in ending.failed


def test_a_call_is_made_again_when_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_calls, "PAUSE_S", 0.0)
    left = [EnvironmentRetryError("busy")] * 2

    def fault() -> None:
        if left:
            raise left.pop()

    environment = Faulty("step", fault)
    ending, session = play(environment, ["one", "two"], max_env_retries=2)
    assert (ending.reward, ending.failed, ending.metrics["environment_retries"]) == (2.0, "", 2.0)
    assert environment.heard == ["one", "two"] and len(session.asked) == 2


def test_a_factory_that_raises_fails_the_trajectory() -> None:
    agent = ToolAgent(raising(OSError("no disk")), TurnLimits())
    ending = asyncio.run(agent.run(ScriptedSession([]), prompt_of()))
    assert ending == Ending(failed="environment: making it raised OSError: no disk")


@pytest.mark.parametrize(
    ("error", "said"),
    [(RefusedRequestError("bad role"), "environment: bad role"), (TurnTimeoutError("too slow"), "turn: too slow")],
)
def test_a_turn_that_is_not_made_fails_the_trajectory(error: Exception, said: str) -> None:
    environment = Counting(2, worth=1.0)
    ending, _ = play(environment, ["one", error])
    assert (ending.reward, ending.failed, environment.closed) == (None, said, 1)


def test_a_session_that_is_over_is_told_to_the_host() -> None:
    environment = Counting(2)
    with pytest.raises(SessionOverError):
        play(environment, ["one", SessionOverError("its group was taken away")])
    assert environment.closed == 1


def test_close_may_fail_without_changing_the_end() -> None:
    ending, _ = play(Faulty("close", raising(OSError("gone"))), ["one", "two"])
    assert (ending.reward, ending.failed) == (2.0, "")


def test_a_cancelled_trajectory_closes_its_environment() -> None:
    environment = Faulty("step", lambda: asyncio.sleep(60))

    async def cancel_in_the_middle() -> None:
        agent = ToolAgent(lambda: environment, TurnLimits())
        running = asyncio.create_task(agent.run(ScriptedSession(["one"]), prompt_of()))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel_in_the_middle())
    assert environment.closed == 1


class Plain:
    """An environment of ordinary methods."""

    tools = ()

    def __init__(self, hang: threading.Event | None = None) -> None:
        self.hang = hang
        self.threads: set[str] = set()

    def reset(self, prompt: Any) -> list[dict[str, Any]]:
        self.threads.add(threading.current_thread().name)
        return prompt.messages

    def step(self, message: dict[str, Any]) -> Step:
        if self.hang is not None:
            self.hang.wait(60)
        return Step(done=True, reward=1.0)

    def score(self) -> None:
        return None

    def close(self) -> None:
        self.threads.add(threading.current_thread().name)


def test_ordinary_methods_run_in_threads() -> None:
    environment = Plain()
    ending, _ = play(environment, ["one"])
    assert ending.reward == 1.0
    assert environment.threads == {"psrl-call"}


def test_ordinary_methods_that_hang_hold_nobody_else() -> None:
    release = threading.Event()

    async def many() -> list[Ending]:
        agent = ToolAgent(lambda: Plain(release), TurnLimits(step_timeout_s=3.0))
        hung = [agent.run(ScriptedSession(["one"]), prompt_of()) for _ in range(40)]
        endings = await asyncio.gather(*hung)
        agent = ToolAgent(Plain, TurnLimits())
        return [*endings, await agent.run(ScriptedSession(["one"]), prompt_of())]

    try:
        *hung, fine = asyncio.run(many())
    finally:
        release.set()
    assert {e.failed for e in hung} == {"environment: no answer to step within multi_turn.step_timeout_s=3"}
    assert fine.reward == 1.0
