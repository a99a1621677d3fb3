"""An environment made of tools: it answers the model's tool calls, and a message without one is the final answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from psrl.agents.base import AgentPrompt, Message
from psrl.agents.environment import BaseEnvironment, Step
from psrl.agents.environment_calls import call, one_line
from psrl.agents.tools.base import Tool, ToolError, schema_of

CUT = "...(cut)..."


class ToolEnvironment(BaseEnvironment):
    """The prompt's own messages, then tools until the model answers; the task's own verifier scores that answer.

    Whatever goes wrong with a call (an unknown tool, arguments that are no JSON, an exception in it) is text for the model.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        max_parallel_calls: int = 1,
        max_response_length: int = 256,
        truncate_side: str = "middle",
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._max_calls, self._length, self._side = max_parallel_calls, max_response_length, truncate_side
        self._calls = self._errors = 0

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return [schema_of(tool) for tool in self._tools.values()]

    async def reset(self, prompt: AgentPrompt) -> Sequence[Message]:
        return prompt.messages

    async def step(self, message: Message) -> Step:
        wanted = message.get("tool_calls") or []
        answers = []
        for number, asked in enumerate(wanted):
            if number < self._max_calls:
                text = await self._answer(asked.get("function") or {})
            else:
                text = f"not called: at most {self._max_calls} a turn"
            answers.append({"role": "tool", "tool_call_id": asked.get("id", ""), "content": self._cut(text)})
        metrics = {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}
        return Step(messages=answers, done=not wanted, metrics=metrics)

    async def _answer(self, function: dict[str, Any]) -> str:
        self._calls += 1
        try:
            return await self._call(str(function.get("name")), function.get("arguments"))
        except ToolError as error:
            text = str(error)
        except Exception as error:  # a tool may raise anything at what a model makes up
            text = one_line(error)
        self._errors += 1
        return f"error: {text}"

    async def _call(self, name: str, written: Any) -> str:
        tool = self._tools.get(name)
        if tool is None:
            raise ToolError(f"there is no tool {name}: there are {', '.join(self._tools)}")
        try:
            arguments = json.loads(written) if isinstance(written, str) else written
        except ValueError as error:
            raise ToolError(f"the arguments are no JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ToolError("the arguments must be a JSON object")
        schema = tool.parameters
        known, needed = schema.get("properties", {}), schema.get("required", ())
        if unknown := arguments.keys() - known.keys():
            raise ToolError(f"{name} takes {', '.join(known) or 'no arguments'}, not {', '.join(sorted(unknown))}")
        if missing := [key for key in needed if key not in arguments]:
            raise ToolError(f"{name} needs {', '.join(missing)}")
        return str(await call(tool.run, **arguments))

    def _cut(self, text: str) -> str:
        return shortened(text, self._length, self._side)


def shortened(text: str, length: int, side: str) -> str:
    """`text` if it has at most `length` characters, else so many of them; `side` says what is kept, as verl names it: left (the
    beginning), right (the end), middle (half of each).

    >>> [shortened("abcdefgh", 4, side) for side in ("left", "right", "middle")]
    ['abcd...(cut)...', '...(cut)...efgh', 'ab...(cut)...gh']
    """
    if len(text) <= length:
        return text
    if side == "left":
        return text[:length] + CUT
    if side == "right":
        return CUT + text[len(text) - length :]
    head = length // 2
    return text[:head] + CUT + text[len(text) - (length - head) :]
