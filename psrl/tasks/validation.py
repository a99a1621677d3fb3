"""The validation prompts: a file, or prompts of the same generated task that training never sees.

A small problem space repeats itself: another seed alone would draw prompts that training has too. So the held-out prompts
are drawn first, and training skips them wherever they turn up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.tasks.base import Answer, Task, TaskItem
from psrl.tasks.registry import TaskSpec, build_task, task_spec

VALIDATION_PROMPTS = "val_prompts.bin"
VALIDATION_SEED = 2_000_029
"""Added to data.seed for the held-out part of a generated task."""


def validates(config: Config) -> bool:
    return config.trainer.test_freq > 0


def validation_spec(config: Config) -> TaskSpec:
    """What the validation prompts are made from, and scored by."""
    data, train = config.data, task_spec(config)
    if data.val_files is None:
        return train.with_seed(train.seed + VALIDATION_SEED)
    return TaskSpec(
        kind="files",
        name=str(Path(data.val_files).absolute()),
        prompt_key=data.prompt_key,
        file_key="data.val_files",
        own_reward=config.reward.function is not None,
    )


class ItemsTask:
    """Chosen items of a task."""

    def __init__(self, task: Task, chosen: list[TaskItem]) -> None:
        self._task, self._chosen = task, chosen

    def items(self) -> Iterator[TaskItem]:
        return iter(self._chosen)

    def score(self, answer: Answer) -> float | None:
        return self._task.score(answer)


class WithoutTask:
    """A task without the items that have one of these prompts."""

    def __init__(self, task: Task, prompts: set[bytes]) -> None:
        self._task, self._prompts = task, prompts

    def items(self) -> Iterator[TaskItem]:
        return (item for item in self._task.items() if prompt_of(item) not in self._prompts)

    def score(self, answer: Answer) -> float | None:
        return self._task.score(answer)


def validation_task(config: Config) -> ItemsTask:
    """The first `data.val_max_samples` prompts (all if below 0), each once. Raises ConfigError if there is none."""
    task, most = build_task(validation_spec(config)), config.data.val_max_samples
    chosen: dict[bytes, TaskItem] = {}
    for item in task.items():
        if 0 <= most <= len(chosen):
            break
        chosen.setdefault(prompt_of(item), item)
    if not chosen:
        raise ConfigError(
            f"data.val_files={config.data.val_files} with data.val_max_samples={most} holds no prompt: validation needs at least one."
        )
    return ItemsTask(task, list(chosen.values()))


def training_task(config: Config, task: Task) -> Task:
    """`task` without the held-out prompts, where prompts are held out at all."""
    if not validates(config) or config.data.val_files is not None:
        return task
    return WithoutTask(task, {prompt_of(item) for item in validation_task(config).items()})


def prompt_of(item: TaskItem) -> bytes:
    return msgspec.msgpack.encode(item.messages)
