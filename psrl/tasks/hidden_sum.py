"""A task that cannot be solved in one turn: the numbers to add are hidden, and are told one at a time to those who ask."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from psrl.tasks.base import Answer, TaskItem, user_message

NAMES = "abcdefgh"
ANSWER = "="


def reply(values: dict[str, int], text: str) -> str | None:
    """What is said to a message of the model; None: the message is an answer, and ends it.

    >>> [reply({"a": 7, "b": 2}, text) for text in ("a", "= 9", "sum?")]
    ['7', None, '?']
    """
    if text.strip().startswith(ANSWER):
        return None
    value = values.get(text.strip())
    return "?" if value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class HiddenSum:
    """`sum b d`: ask `b` and hear its number, ask `d`, then answer `= 9`. Reward 1 for the right sum, else 0.

    Nothing in the prompt says what the numbers are, so who does not ask guesses.
    """

    seed: int = 0
    size: int = 4096
    terms: int = 2
    largest: int = 9

    def __post_init__(self) -> None:
        if not (self.size >= 1 and 1 <= self.terms <= len(NAMES) and self.largest >= 1):
            raise ValueError(f"{self} is refused: allowed is size >= 1, 1 <= terms <= {len(NAMES)}, largest >= 1")

    def items(self) -> Iterator[TaskItem]:
        rng = random.Random(self.seed)
        for _ in range(self.size):
            asked = rng.sample(NAMES, self.terms)
            values = {name: rng.randint(0, self.largest) for name in asked}
            total = str(sum(values.values()))
            yield TaskItem(
                messages=user_message(f"sum {' '.join(asked)}"),
                data_source="hidden_sum",
                ground_truth=total,
                extra_info={"values": values},
                dialogue=_played(values, f"{ANSWER} {total}"),
            )

    def score(self, answer: Answer) -> float:
        text = answer.solution_str.strip()
        return float(text.startswith(ANSWER) and text.removeprefix(ANSWER).strip() == str(answer.ground_truth))


def _played(values: dict[str, int], answer: str) -> list[dict[str, Any]]:
    """The turns of somebody who knows how."""
    turns = [
        message
        for name, value in values.items()
        for message in ({"role": "assistant", "content": name}, {"role": "user", "content": str(value)})
    ]
    return [*turns, {"role": "assistant", "content": answer}]
