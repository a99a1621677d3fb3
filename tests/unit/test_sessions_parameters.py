"""What a chat completion request may say."""

from __future__ import annotations

from typing import Any

import pytest
from session_parts import ADD, user

from psrl.sessions.errors import RefusedRequestError
from psrl.sessions.parameters import chat_body

pytestmark = pytest.mark.unit
HI = [user("Hi")]


def test_everything_that_is_understood() -> None:
    body = chat_body(
        {
            "messages": HI, "model": "whatever", "tools": [ADD], "tool_choice": "auto", "temperature": 0, "top_p": 0.5,
            "seed": 3, "stop": "x", "max_completion_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
            "logprobs": True, "top_logprobs": 0, "n": 1, "user": "me", "response_format": {"type": "text"},
            "parallel_tool_calls": True, "frequency_penalty": 0.0, "logit_bias": {}, "metadata": {"a": "b"},
        }
    )  # fmt: skip
    request = body.request
    assert (request.messages, request.tools, request.stop, request.max_tokens) == (HI, [ADD], ("x",), 9)
    assert (request.temperature, request.top_p, request.seed) == (0.0, 0.5, 3)
    assert (body.stream, body.include_usage, body.logprobs) == (True, True, True)


def test_null_is_as_good_as_nothing() -> None:
    keys = ("temperature", "top_p", "seed", "stop", "max_tokens", "tools", "tool_choice", "stream", "n", "audio")
    assert chat_body({"messages": HI} | dict.fromkeys(keys)) == chat_body({"messages": HI})


def test_the_run_decides_what_is_not_said() -> None:
    request = chat_body({"messages": HI, "tool_choice": "none"}, retry=True).request
    assert (request.temperature, request.top_p, request.seed, request.max_tokens) == (None,) * 4
    assert request.retry and request.stop == () and not request.tools


REFUSED: list[tuple[Any, str, str | None]] = [
    ([], "must be a JSON object", None),
    ({}, "messages must be a list", "messages"),
    ({"messages": "Hi"}, "messages must be a list", "messages"),
    ({"n": 2}, "n=2 is not supported: only 1 is", "n"),
    ({"n": True}, "n=True is not supported", "n"),
    ({"top_logprobs": 1}, "top_logprobs=1 is not supported", "top_logprobs"),
    ({"tool_choice": "required"}, "only 'auto' is", "tool_choice"),
    ({"tool_choice": "none", "tools": [ADD]}, "only 'auto' is", "tool_choice"),
    ({"parallel_tool_calls": False}, "only True is", "parallel_tool_calls"),
    ({"presence_penalty": 0.1}, "only 0 is", "presence_penalty"),
    ({"response_format": {"type": "json_object"}}, "is not supported", "response_format"),
    ({"functions": []}, "functions is not supported", "functions"),
    ({"top_k": 3}, "Unrecognized request argument: top_k", "top_k"),
    ({"temperature": 2.5}, "temperature=2.5 must be a number from 0 to 2", "temperature"),
    ({"temperature": float("nan")}, "must be a number", "temperature"),
    ({"temperature": True}, "must be a number", "temperature"),
    ({"top_p": 0}, "above 0", "top_p"),
    ({"seed": 1.5}, "must be a whole number", "seed"),
    ({"seed": 2**63}, "must be a whole number", "seed"),
    ({"max_tokens": 0}, "from 1", "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "differ", "max_tokens"),
    ({"stop": ["a", ""]}, "none of them empty", "stop"),
    ({"stop": list("abcde")}, "up to 4", "stop"),
    ({"stream": "yes"}, "must be true or false", "stream"),
    ({"stream_options": {}}, "needs stream=true", "stream_options"),
    ({"stream": True, "stream_options": {"include": 1}}, "knows include_usage", "stream_options"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\] must be of type function", "tools[0]"),
    ({"tools": [ADD, {"type": "function", "function": {"name": "f", "parameters": 1}}]}, "JSON schema", "tools[1]"),
    ({"tools": [ADD] * 129}, "up to 128", "tools"),
]


@pytest.mark.parametrize(("body", "reason", "param"), REFUSED)
def test_what_cannot_be_honoured_is_refused(body: Any, reason: str, param: str | None) -> None:
    if isinstance(body, dict) and body and "messages" not in body:
        body = {"messages": HI} | body
    with pytest.raises(RefusedRequestError, match=reason) as refusal:
        chat_body(body)
    assert refusal.value.param == param
