"""Products too large for the model's head, with the verifier of reasoning-gym, and dialogues that show how a calculator is called."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from psrl.agents.tools.calculator import Calculator, calculate
from psrl.tasks.base import Answer, TaskItem
from psrl.tasks.reasoning_gym import ReasoningGymTask

EXPRESSION = re.compile(r"[-(\d][-+*/() \d]*[)\d]")
TOOLS = f"Tools:\n{Calculator.name}({', '.join(Calculator.parameters['properties'])}): {Calculator.description}"
"""What the tiny model's chat template writes into the system message for `multi_turn.tools=[calculator]`."""


class CalculatorTask(ReasoningGymTask):
    """A dataset whose questions hold one arithmetic expression each: products, chain_sum, basic_arithmetic.

    The warm start learns from the dialogues. A share `calls` of them asks the calculator; in the others somebody knows the
    result by heart, which the model cannot. It begins RL with both habits, and only one of them pays.
    """

    def __init__(
        self, *, seed: int, dataset: str = "products", size: int = 4096, calls: float = 0.5, **params: Any
    ) -> None:
        super().__init__(dataset, size, seed, params)
        self._seed, self._calls = seed, calls

    def items(self) -> Iterator[TaskItem]:
        rng = random.Random(self._seed)
        for item in super().items():
            dialogue = [{"role": "assistant", "content": item.ground_truth}]
            if rng.random() < self._calls:
                dialogue = [*_call(item), *dialogue]
            shown = [{"role": "system", "content": TOOLS}, *item.messages]
            yield replace(item, messages=shown, agent_messages=item.messages, solution=None, dialogue=dialogue)

    def score(self, answer: Answer) -> float:
        """The verifier's full marks or nothing. It gives part of them where the result stands between other digits: the model found
        out that 754808 for 54808 is worth 5/6, and left it at that."""
        return float(super().score(answer) == 1.0)


def _call(item: TaskItem) -> list[dict[str, Any]]:
    """The call, and what the calculator says."""
    [expression] = EXPRESSION.findall(item.messages[0]["content"])
    call = {"name": Calculator.name, "arguments": {"expression": expression}}
    return [
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": str(calculate(expression))},
    ]
