"""What a tool is: a function that the model may call, with a JSON schema of its arguments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol


class ToolError(Exception):
    """The call cannot be answered; the text goes to the model, which may do better."""


class Tool(Protocol):
    """`module:name` in `multi_turn.tools` is called without arguments and gives one of these, for each trajectory anew."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """For the model."""
        ...

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments: {"type": "object", "properties": {...}, "required": [...]}."""
        ...

    @property
    def run(self) -> Callable[..., str | Awaitable[str]]:
        """Called with the arguments by name; a coroutine function, or an ordinary one: that runs in a thread. Any exception
        becomes text for the model, so that a trajectory does not fail by what the model wrote."""
        ...


def schema_of(tool: Tool) -> dict[str, Any]:
    """The entry of the request's `tools`."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }
