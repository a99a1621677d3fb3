"""Chat messages as clients write them, in the one form that templates render, and a digest of each history of them.

Clients send the same message in several ways: content as a string, as parts or not at all, arguments of a tool call with other
spaces, fields that are null. All of them are one message here, so that a conversation is recognised when it comes back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from psrl.sessions.errors import RefusedRequestError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


def normal_messages(messages: Sequence[Any]) -> list[Message]:
    """Each message with `role` and `content` (a string), and `tool_calls`, `tool_call_id`, `name` where there are any; every
    other field is dropped. Arguments of tool calls become objects, which is what chat templates expect.

    Raises RefusedRequestError, naming the field.

    >>> normal_messages([{"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2"}]}])
    [{'role': 'user', 'content': '1 + 2'}]
    """
    if not messages:
        raise RefusedRequestError("messages is empty: at least one message is needed.", "messages")
    return [_normal(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normal(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise RefusedRequestError(f"{where} must be an object with role and content.", where)
    role = message.get("role")
    if role not in ROLES:
        raise RefusedRequestError(f"{where}.role={role!r} is unknown: allowed are {', '.join(ROLES)}.", f"{where}.role")
    calls = message.get("tool_calls") or []
    if calls and role != "assistant":
        raise RefusedRequestError(f"{where}.tool_calls: only an assistant's message has tool calls.", where)
    if message.get("content") is None and role != "assistant":
        raise RefusedRequestError(f"{where}.content is missing: a message of role {role} needs it.", f"{where}.content")
    normal: Message = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), f"{where}.content"),
    }
    if calls:
        normal["tool_calls"] = [_normal_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            normal[key] = str(message[key])
    return normal


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedRequestError(f"{where} must be a string or a list of text parts.", where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RefusedRequestError(f"{where} has a part of type {kind!r}: this model reads text only.", where)
    return "".join(part["text"] for part in content)


def _normal_call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedRequestError(f"{where} must be a function call with a name.", where)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(arguments: Any) -> Any:
    """An object; what is not JSON stays the string that it is."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def history_digests(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """Digest of each beginning of the conversation, the empty one first: `digests[i]` stands for the tools and `messages[:i]`."""
    digest = blake2b(_canonical(list(tools)), digest_size=16).digest()
    return [digest, *_further(digest, messages)]


def _further(digest: bytes, messages: Sequence[Message]) -> Iterator[bytes]:
    for message in messages:
        digest = extended(digest, message)
        yield digest


def extended(history: bytes, message: Message) -> bytes:
    """Digest of the history with one (normal) message more.

    An assistant's message is recognised by its text, outer white space aside (clients strip it), and by the names and
    arguments of its calls; their ids say nothing about what the model wrote.
    """
    if message["role"] == "assistant":
        calls = [call["function"] for call in message.get("tool_calls", ())]
        message = {"role": "assistant", "content": message["content"].strip(), "tool_calls": calls}
    return blake2b(history + _canonical(message), digest_size=16).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
