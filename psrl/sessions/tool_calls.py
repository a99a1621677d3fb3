"""Tool calls in what a model wrote: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models do."""

from __future__ import annotations

import json
from typing import Any

from psrl.sessions.messages import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def split_tool_calls(text: str, id_prefix: str) -> tuple[str, list[Message]]:
    """(the text around the calls, the calls in OpenAI's shape with ids `{id_prefix}0`, ...). If any of them is malformed
    (not closed, not JSON, no name, arguments that are no object), none is a call and all is text.

    >>> split_tool_calls('So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "c")[0]
    'So: '
    """
    around, *blocks = text.split(OPEN)
    calls: list[Message] = []
    for block in blocks:
        written, closed, behind = block.partition(CLOSE)
        call = _parsed(written) if closed else None
        if call is None:
            return text, []
        calls.append({"id": f"{id_prefix}{len(calls)}", "type": "function", "function": call})
        around += behind
    return around, calls


def _parsed(written: str) -> dict[str, str] | None:
    try:
        call: Any = json.loads(written)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        # Neither infinities nor half a surrogate pair: the reply must be JSON in UTF-8.
        parsed = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
        "".join(parsed.values()).encode()
    except (ValueError, RecursionError):
        return None
    return parsed
