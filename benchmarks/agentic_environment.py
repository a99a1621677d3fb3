"""An environment that costs what a real one does and asks for no skill: `turns` observations of `tokens` tokens, each after a
lognormal time. Every prompt begins with the same long system message, so turns and conversations share prefixes."""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.agents.base import AgentPrompt
from psrl.agents.environment import BaseEnvironment, Step
from psrl.tasks.base import Answer, TaskItem

LETTERS = "bcdfghjklmnpqrstvwxz"


def text(seed: int, tokens: int) -> str:
    """About so many tokens of any tokenizer that knows no words made of these letters."""
    return "".join(random.Random(seed).choices(LETTERS, k=tokens))


@dataclass(frozen=True, kw_only=True)
class Chores:
    """A task whose prompts share a system message of `system_tokens`; the reward is drawn, so that nothing is learned."""

    seed: int = 0
    size: int = 4096
    system_tokens: int = 128
    prompt_tokens: int = 16

    def items(self) -> Iterator[TaskItem]:
        system = {"role": "system", "content": text(0, self.system_tokens)}
        for i in range(self.size):
            content = text(self.seed * self.size + i + 1, self.prompt_tokens)
            yield TaskItem(
                messages=[system, {"role": "user", "content": content}], data_source="chores", ground_truth=i
            )

    def score(self, answer: Answer) -> float:
        return float(zlib.crc32(answer.solution_str.encode()) % 2)


class Environment(BaseEnvironment):
    def __init__(self, turns: int = 6, tokens: int = 32, seconds: float = 0.2, sigma: float = 1.0) -> None:
        self.turns, self.tokens, self.seconds, self.sigma = turns, tokens, seconds, sigma
        self.made = 0
        self.random = random.Random(0)

    async def reset(self, prompt: AgentPrompt) -> Sequence[dict[str, Any]]:
        self.random = random.Random(prompt.index)
        return prompt.messages

    async def step(self, message: dict[str, Any]) -> Step:
        self.made += 1
        if self.made >= self.turns:
            return Step(done=True)
        mean = math.log(self.seconds) - self.sigma * self.sigma / 2
        await asyncio.sleep(self.random.lognormvariate(mean, self.sigma))
        return Step(messages=[{"role": "user", "content": text(self.random.getrandbits(30), self.tokens)}])
