"""The native multi-turn loop: the model and an environment take turns until one of them ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from psrl.agents.base import AgentPrompt, ChatSession, Ending, Message
from psrl.agents.environment import Environment
from psrl.agents.environment_calls import EnvironmentCalls, EnvironmentFailedError, one_line
from psrl.agents.rewards import WrongRewardError, finite_metrics, finite_reward
from psrl.sessions.errors import ContextExceededError, RefusedRequestError, TurnLimitError, TurnTimeoutError
from psrl.sessions.session import ChatReply, ChatRequest

ENDS_A_TURN = ("stop", "tool_calls")
"""Finish reasons of a whole message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Keys of `multi_turn`."""

    max_assistant_turns: int | None = None
    max_tokens_per_turn: int | None = None
    go_on_after_cut: bool = False
    step_timeout_s: float = 60.0
    max_env_retries: int = 2


class ToolAgent:
    """A SampleAgent: each trajectory has an environment of its own, which `make_environment` makes."""

    def __init__(self, make_environment: Callable[[], Environment], limits: TurnLimits) -> None:
        self._make_environment, self._limits = make_environment, limits

    async def run(self, session: ChatSession, prompt: AgentPrompt) -> Ending:
        """Play until the environment is done, a turn is cut short, or turns or context are used up: the last three are
        ends too, scored as they are."""
        try:
            environment = self._make_environment()
        except Exception as error:  # user code
            return Ending(failed=f"environment: making it raised {one_line(error)}")
        calls = EnvironmentCalls(
            environment, timeout_s=self._limits.step_timeout_s, retries=self._limits.max_env_retries
        )
        try:
            return await self._play(session, prompt, calls)
        except (EnvironmentFailedError, WrongRewardError, RefusedRequestError) as error:
            # The last: it put something into the conversation that no chat template takes.
            return Ending(failed=f"environment: {error}")
        except TurnTimeoutError as error:
            return Ending(failed=f"turn: {error}")
        finally:
            await asyncio.shield(calls.close())

    async def _play(self, session: ChatSession, prompt: AgentPrompt, environment: EnvironmentCalls) -> Ending:
        messages, tools = await environment.reset(prompt)
        tally = _Tally()
        while tally.turns != self._limits.max_assistant_turns:
            reply = await self._turn(session, messages, tools)
            if reply is None:
                break
            tally.turns += 1
            if reply.finish_reason not in ENDS_A_TURN and not self._limits.go_on_after_cut:
                break
            step = await environment.step(reply.message)
            tally.add(step.reward, step.metrics)
            if step.done:
                break
            messages += [reply.message, *step.messages]
        tally.add(await environment.score(), {"environment_retries": environment.retried})
        return tally.ending()

    async def _turn(self, session: ChatSession, messages: list[Message], tools: list[Message]) -> ChatReply | None:
        """The model's next message; None where the conversation has no room for one."""
        request = ChatRequest(messages=list(messages), tools=tools, max_tokens=self._limits.max_tokens_per_turn)
        try:
            return await session.chat(request)
        except (ContextExceededError, TurnLimitError):
            return None


@dataclass(slots=True)
class _Tally:
    """What a trajectory has earned so far."""

    turns: int = 0
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, reward: float | None, metrics: Mapping[str, float]) -> None:
        earned = finite_reward(reward)
        if earned is not None:
            self.reward = earned + (self.reward or 0.0)
        self.metrics |= finite_metrics(metrics)

    def ending(self) -> Ending:
        return Ending(self.reward, {**self.metrics, "assistant_turns": float(self.turns)})
