"""What makes one trajectory: the SampleAgent protocol, what it is given, and how it may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from psrl.sessions.session import ChatReply, ChatRequest

Message = dict[str, Any]
"""A chat message as the OpenAI API has it: role, content, and what goes with the role."""


class AgentPrompt(Protocol):
    """What an agent may know of its prompt (psrl.tasks.base.PreparedPrompt has all of it)."""

    index: int
    messages: list[Message]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


class ChatSession(Protocol):
    """One trajectory's way to the model. Every turn made here is captured, token for token."""

    @property
    def id(self) -> str: ...

    async def chat(self, request: ChatRequest, on_delta: Callable[..., None] | None = None) -> ChatReply:
        """The model's next message. Raises what psrl.sessions.chat says, and SessionOverError once the trajectory takes no
        further turn."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI client reaches the sessions of this agent loop."""

    url: str
    """Without the session: http://127.0.0.1:4711."""
    api_key: str

    def of(self, session: str) -> str:
        """The base URL of one session.

        >>> Endpoint("http://127.0.0.1:4711", "k").of("a1")
        'http://127.0.0.1:4711/sessions/a1/v1'
        """
        return f"{self.url}/sessions/{session}/v1"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a trajectory ended.

    A failed one (an exception, a deadline, an environment out of order) is never trained, least of all as reward 0:
    `failed` says why in a few words. Otherwise `reward` counts, or, where it is None, the task's own verifier scores the
    last assistant message.
    """

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    failed: str = ""


class SampleAgent(Protocol):
    """Makes trajectories, any number at the same time: each call of `run` is one sample of a group."""

    async def run(self, session: ChatSession, prompt: AgentPrompt) -> Ending:
        """Play one trajectory to its end. Faults of the environment or of the agent's own code are an Ending that failed;
        SessionOverError goes through. Cancelling it ends everything that it started."""
        ...
