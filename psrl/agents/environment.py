"""What a native multi-turn trajectory plays against: the Environment protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from psrl.agents.base import AgentPrompt, Message


class EnvironmentRetryError(Exception):
    """Raised by an environment that is out of order for a moment and has changed nothing: the same call may be made again."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to one assistant message.

    `messages` follow it in the conversation (roles "tool" and "user"). `reward` is what this step alone is worth: the rewards of
    a trajectory are added up. `metrics` replace those of earlier steps.
    """

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One trajectory's environment. Each method may be a coroutine function, or an ordinary one: that runs in a thread.

    Every call has a deadline (`multi_turn.step_timeout_s`). An exception fails the trajectory, which is then never trained;
    EnvironmentRetryError has the same call made again. What the model did wrong is no exception: tell the model.
    """

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """What the model is told that it can call, as the OpenAI API has it; read once, after `reset`."""
        ...

    def reset(self, prompt: AgentPrompt) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begin; returns the conversation's first messages."""
        ...

    def step(self, message: Message) -> Step | Awaitable[Step]:
        """Answer an assistant message. Not called after a step that was done."""
        ...

    def score(self) -> float | Awaitable[float | None] | None:
        """What the trajectory as a whole is worth, whatever ended it (turns and tokens used up, too); added to the steps'
        rewards. None, and no step with a reward: the task's own verifier scores the last assistant message."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Give everything back. Called once, also after a failed `reset` and while a call that hung is still running."""
        ...


class BaseEnvironment:
    """Defaults for everything but `step`: the prompt's own messages, no tools, rewards by steps, nothing to give back."""

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return ()

    async def reset(self, prompt: AgentPrompt) -> Sequence[Message]:
        return prompt.messages

    async def score(self) -> float | None:
        return None

    async def close(self) -> None:
        return None
