"""The body of a chat completion request, checked: what is understood, what is ignored, what is refused.

As the official API does, an argument that nobody knows is an error. One that it knows and psrl cannot honour (a penalty, a
forced tool call) is an error too, unless it has the value that changes nothing: tokens that were sampled in another way than
their log-probs say would train the model on something that it did not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from psrl.sessions.errors import RefusedRequestError
from psrl.sessions.session import ChatRequest

IGNORED = {
    "metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"
}  # fmt: skip
"""They say nothing about the tokens. Any `model` is answered by the run's: agents have names of their own for it."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
}
"""Accepted with these values only (top_logprobs: only the sampled token's log-prob is known)."""
UNSUPPORTED = {
    "audio", "function_call", "functions", "prediction", "reasoning_effort", "verbosity", "web_search_options"
}  # fmt: skip
UNDERSTOOD = {
    "logprobs", "max_completion_tokens", "max_tokens", "messages", "seed", "stop", "stream", "stream_options", "temperature",
    "tools", "top_p",
}  # fmt: skip
MOST_STOPS = 4
MOST_TOOLS = 128


@dataclass(frozen=True, slots=True)
class ChatBody:
    request: ChatRequest
    stream: bool
    include_usage: bool
    logprobs: bool


def chat_body(body: Any, retry: bool = False) -> ChatBody:
    """Raises RefusedRequestError, naming the argument."""
    if not isinstance(body, dict):
        raise RefusedRequestError("The body must be a JSON object.")
    given = {key: value for key, value in body.items() if value is not None}
    if given.get("tool_choice") == "none" and not given.get("tools"):
        del given["tool_choice"]
    for key, value in given.items():
        _check_known(key, value)
    messages = given.get("messages")
    if not isinstance(messages, list):
        raise RefusedRequestError("messages must be a list of messages.", "messages")
    stream = _flag(given, "stream")
    return ChatBody(
        request=ChatRequest(
            messages=messages,
            tools=_tools(given.get("tools", [])),
            max_tokens=_max_tokens(given),
            temperature=_number(given, "temperature", 0, 2),
            top_p=_number(given, "top_p", 0, 1, positive=True),
            seed=_integer(given, "seed", -(2**63), 2**63 - 1),
            stop=_stop(given.get("stop", [])),
            retry=retry,
        ),
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream),
        logprobs=_flag(given, "logprobs"),
    )


def _check_known(key: str, value: Any) -> None:
    if key in NEUTRAL:
        if not any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in NEUTRAL[key]
        ):
            allowed = " or ".join(map(repr, NEUTRAL[key]))
            raise RefusedRequestError(f"{key}={value!r} is not supported: only {allowed} is.", key, "unsupported_value")
    elif key in UNSUPPORTED:
        raise RefusedRequestError(f"{key} is not supported.", key, "unsupported_parameter")
    elif key not in UNDERSTOOD | IGNORED:
        raise RefusedRequestError(f"Unrecognized request argument: {key}.", key, "unknown_parameter")


def _flag(given: dict[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise RefusedRequestError(f"{key}={value!r} must be true or false.", key)
    return value


def _number(given: dict[str, Any], key: str, low: float, high: float, positive: bool = False) -> float | None:
    if (value := given.get(key)) is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not number or not low <= value <= high or (positive and value <= 0):
        above = " and above 0" if positive else ""
        raise RefusedRequestError(f"{key}={value!r} must be a number from {low} to {high}{above}.", key)
    return float(value)


def _integer(given: dict[str, Any], key: str, low: int, high: int) -> int | None:
    if (value := given.get(key)) is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RefusedRequestError(f"{key}={value!r} must be a whole number from {low} to {high}.", key)
    return value


def _max_tokens(given: dict[str, Any]) -> int | None:
    old, new = (_integer(given, key, 1, 2**31 - 1) for key in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise RefusedRequestError("max_tokens and max_completion_tokens differ: give one of them.", "max_tokens")
    return new if old is None else old


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RefusedRequestError(f"stop must be a string or up to {MOST_STOPS} strings, none of them empty.", "stop")
    return tuple(stops)


def _tools(value: Any) -> Sequence[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise RefusedRequestError(f"tools must be a list of up to {MOST_TOOLS} tools.", "tools")
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedRequestError(f"tools[{i}] must be of type function and have a name.", f"tools[{i}]")
        if not isinstance(function.get("parameters", {}), dict):
            raise RefusedRequestError(f"tools[{i}].function.parameters must be a JSON schema.", f"tools[{i}]")
    return value


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise RefusedRequestError("stream_options needs stream=true.", "stream_options")
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise RefusedRequestError("stream_options knows include_usage.", "stream_options")
    return _flag(options, "include_usage")
