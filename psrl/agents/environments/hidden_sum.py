"""Plays the task hidden_sum: tells the model the numbers that it asks for."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.agents.base import AgentPrompt, Message
from psrl.agents.environment import BaseEnvironment, Step
from psrl.tasks.hidden_sum import reply


class HiddenSumEnvironment(BaseEnvironment):
    """Ends with the model's answer, which the task's own verifier scores."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._asked = 0

    async def reset(self, prompt: AgentPrompt) -> Sequence[Message]:
        self._values = prompt.extra_info["values"]
        return prompt.messages

    async def step(self, message: Message) -> Step:
        said = reply(self._values, str(message.get("content") or ""))
        if said is None:
            return Step(done=True, metrics={"asked": float(self._asked)})
        self._asked += 1
        return Step(messages=[{"role": "user", "content": said}], metrics={"asked": float(self._asked)})
