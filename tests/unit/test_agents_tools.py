"""Tools and the environment that is made of them."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from typing import Any

import pytest
from agent_sessions import ScriptedSession, Turn, prompt_of, tool_call

from psrl.agents.base import Ending
from psrl.agents.environments import environment_factory
from psrl.agents.multi_turn import ToolAgent, TurnLimits
from psrl.agents.sandbox import Limits
from psrl.agents.tool_environment import CUT, ToolEnvironment, shortened
from psrl.agents.tools import make_tool
from psrl.agents.tools.base import ToolError
from psrl.agents.tools.calculator import Calculator, calculate
from psrl.config.agents import MultiTurnConfig
from psrl.config.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("-2 ** 2", -4),
        ("2 ^ 10", 1024),
        ("7 // 2 + 7 % 2", 4),
        ("1 / 4", 0.25),
        ("+3.5 - 1", 2.5),
        ("2 ** -1", 0.5),
        (" 2\n", 2),
    ],
)
def test_the_calculator_calculates(expression: str, value: float) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("__import__('os').system('true')", "only numbers"),
        ("a + 1", "only numbers"),
        ("(lambda: 1)()", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j * 2", "only numbers"),
        ("'a' * 10", "only numbers"),
        ("1 << 90", "only numbers"),
        ("[1] * 9", "only numbers"),
        ("1 +", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("1\x00", "no arithmetic expression"),
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("9 ** 99999999999", "too large"),
        ("2.0 ** 99999", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("9" * 401, "at most 400 characters"),
        ("(" * 200 + "1" + ")" * 199, "no arithmetic expression"),
        ("(" * 200 + ")" * 200, "only numbers"),
    ],
)
def test_the_calculator_refuses_everything_else(expression: str, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        calculate(expression)


@pytest.mark.parametrize("expression", ["9" * 390, "-" * 399 + "1", "*".join(["9" * 12] * 30), "9**9**3"])
def test_the_worst_expressions_end(expression: str) -> None:
    try:
        assert len(str(calculate(expression))) < 700
    except ToolError as error:
        assert "too large" in str(error)


class Echo:
    """A tool of ordinary code that may fail."""

    name, description = "echo", "says it again"
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["text"],
    }

    def run(self, text: str, times: int = 1) -> str:
        if text == "raise":
            raise ValueError("as asked")
        return text * times


def answers(message: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    environment = ToolEnvironment([Calculator(), Echo()], **settings)
    return list(asyncio.run(environment.step(message)).messages)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("calculator", '{"expression": "6 * 7"}', "42"),
        ("echo", '{"text": "a", "times": 3}', "aaa"),
        ("echo", '{"text": "raise"}', "error: ValueError: as asked"),
        ("echo", '{"text": "a", "times": "b"}', "error: TypeError: can't multiply sequence by non-int of type 'str'"),
        ("calculator", '{"expression": "1 / 0"}', "error: division by zero"),
        ("calculate", "{}", "error: there is no tool calculate: there are calculator, echo"),
        ("echo", "{}", "error: echo needs text"),
        ("echo", '{"text": "a", "run": 1}', "error: echo takes text, times, not run"),
        ("echo", "[1]", "error: the arguments must be a JSON object"),
        ("echo", "text", "error: the arguments are no JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_call_is_answered_whatever_is_wrong_with_it(name: str, arguments: str, said: str) -> None:
    [answer] = answers(tool_call(name, arguments, "c7"))
    assert answer == {"role": "tool", "tool_call_id": "c7", "content": said}


def test_calls_beyond_the_limit_are_told_that_they_were_not_made() -> None:
    calls = [tool_call("echo", json.dumps({"text": str(i)}), f"c{i}")["tool_calls"][0] for i in range(3)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert [a["content"] for a in answers(message, max_parallel_calls=2)] == ["0", "1", "not called: at most 2 a turn"]


@pytest.mark.parametrize(
    ("text", "side", "kept"),
    [
        ("abcd", "left", "abcd"),
        ("abcdefgh", "left", f"abcd{CUT}"),
        ("abcdefgh", "right", f"{CUT}efgh"),
        ("abcdefgh", "middle", f"ab{CUT}gh"),
    ],
)
def test_long_answers_are_cut(text: str, side: str, kept: str) -> None:
    assert shortened(text, 4, side) == kept
    [answer] = answers(tool_call("echo", json.dumps({"text": text})), max_response_length=4, truncate_side=side)
    assert answer["content"] == kept


def play(turns: list[Turn], **settings: Any) -> tuple[Ending, ScriptedSession]:
    session = ScriptedSession(turns)
    agent = ToolAgent(environment_factory(MultiTurnConfig(**settings)), TurnLimits())
    return asyncio.run(agent.run(session, prompt_of())), session


def test_a_trajectory_with_tools_ends_with_the_answer_which_the_verifier_scores() -> None:
    turns: list[Turn] = [tool_call("calculator", '{"expression": "6 * 7"}'), tool_call("nothing", "{}"), "It is 42."]
    ending, session = play(turns, tools=["calculator"])
    assert (ending.reward, ending.failed) == (None, "")
    assert ending.metrics == {"tool_calls": 2, "tool_errors": 1, "assistant_turns": 3, "environment_retries": 0}
    assert [m["role"] for m in session.asked[-1].messages] == ["user", "assistant", "tool", "assistant", "tool"]
    [tool] = session.asked[0].tools
    assert tool["type"] == "function" and tool["function"]["name"] == "calculator"
    assert tool["function"]["parameters"]["required"] == ["expression"]


def test_hidden_sum_is_played() -> None:
    session = ScriptedSession(["b", "x", "d", "= 9"])
    agent = ToolAgent(environment_factory(MultiTurnConfig(environment="hidden_sum")), TurnLimits())
    ending = asyncio.run(agent.run(session, prompt_of("sum b d", extra_info={"values": {"b": 7, "d": 2}})))
    assert [m["content"] for m in session.asked[-1].messages] == ["sum b d", "b", "7", "x", "?", "d", "2"]
    assert (ending.reward, ending.failed, ending.metrics["asked"]) == (None, "", 3.0)


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("own_agents")
    module.Echo = Echo  # type: ignore[attr-defined]
    module.bare = object  # type: ignore[attr-defined]
    module.broken = lambda: 1 / 0  # type: ignore[attr-defined]

    class Own:
        def __init__(self, size: int) -> None:
            self.size = size

    module.Own = Own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_agents", module)
    return "own_agents"


def test_tools_and_environments_of_ones_own(own_module: str) -> None:
    assert make_tool(f"{own_module}:Echo", Limits())().name == "echo"
    make = environment_factory(MultiTurnConfig(environment=f"{own_module}:Own", environment_params={"size": 3}))
    assert make().size == 3 and make() is not make()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tools": ["abacus"]}, "multi_turn.tools names abacus, which is unknown: allowed are calculator, python"),
        ({"tools": ["own_agents:bare"]}, "gave a object without name, description, parameters, run"),
        ({"tools": ["own_agents:broken"]}, "making it raised ZeroDivisionError"),
        ({"tools": ["own_agents:none"]}, "multi_turn.tools=own_agents:none: own_agents has no such name"),
        ({"environment": "chess"}, "multi_turn.environment=chess is unknown: allowed are hidden_sum"),
        ({"environment": "own_agents:none"}, "multi_turn.environment=own_agents:none"),
        ({"environment": "own_agents:Own"}, "refuses .*: missing a required argument: 'size'"),
        ({"environment": "hidden_sum", "environment_params": {"x": 1}}, "got an unexpected keyword argument 'x'"),
    ],
)
def test_what_cannot_be_built_is_refused(settings: dict[str, Any], said: str, own_module: str) -> None:
    with pytest.raises(ConfigError, match=said):
        environment_factory(MultiTurnConfig(**settings))
