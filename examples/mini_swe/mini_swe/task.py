"""The task: one repository an item, told as an issue."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from mini_swe.kinds import KINDS
from mini_swe.repository import make_repository
from psrl.tasks.base import Answer, TaskItem

SYSTEM = (
    "You mend a bug in a small Python repository. The tool `shell` runs a bash command in it. Look at the code, change "
    "it, run the tests. When the bug is gone, answer with one sentence and no tool call."
)


@dataclass(frozen=True, kw_only=True)
class MiniSwe:
    """`data.task=mini_swe.task:MiniSwe`. `kinds`: those of mini_swe.kinds.KINDS to draw from; null: all."""

    seed: int = 0
    size: int = 1024
    kinds: list[str] | None = None

    def __post_init__(self) -> None:
        if unknown := set(self.kinds or ()) - KINDS.keys():
            raise ValueError(f"kinds {', '.join(sorted(unknown))} are unknown: allowed are {', '.join(KINDS)}")
        if self.size < 1:
            raise ValueError("size must be at least 1")

    def items(self) -> Iterator[TaskItem]:
        rng = random.Random(self.seed)
        for _ in range(self.size):
            kind, seed = rng.choice(self.kinds or list(KINDS)), rng.randrange(2**31)
            repository = make_repository(kind, seed)
            files = ", ".join(sorted(repository.files))
            yield TaskItem(
                messages=[
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f"{repository.issue}\n\nThe repository has {files}."},
                ],
                data_source=f"mini_swe/{kind}",
                extra_info={"kind": kind, "seed": seed},
            )

    def score(self, answer: Answer) -> None:
        """What the model says is worth nothing: the environment runs the hidden tests."""
        return None
