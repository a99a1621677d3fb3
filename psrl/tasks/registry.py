"""Which task a configuration means. The specification, not the task, travels to the scoring processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.tasks.base import Task
from psrl.tasks.hidden_sum import HiddenSum
from psrl.tasks.synthetic import DigitSum, LongtailCount

BUILT_IN: dict[str, Callable[..., Task]] = {
    "digit_sum": DigitSum,
    "longtail_count": LongtailCount,
    "hidden_sum": HiddenSum,
}


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Enough to build the task anywhere. `kind` is reasoning_gym | files | built_in | object."""

    kind: str
    name: str
    seed: int = 0
    size: int = 0
    params: dict[str, Any] = {}
    prompt_key: str = "prompt"
    file_key: str = "data.train_files"
    """The configuration key that named the file."""
    own_reward: bool = False
    """A reward function scores the answers, so the task need not be able to."""

    def with_seed(self, seed: int) -> TaskSpec:
        return msgspec.structs.replace(self, seed=seed)


def task_spec(config: Config) -> TaskSpec:
    """The task that the configuration selects. Raises ConfigError unless exactly one key selects one."""
    data = config.data
    choices = {
        "data.train_files": data.train_files,
        "data.reasoning_gym.dataset": data.reasoning_gym.dataset,
        "data.task": data.task,
    }
    chosen = {key: value for key, value in choices.items() if value is not None}
    if len(chosen) != 1:
        said = " and ".join(f"{key}={value}" for key, value in chosen.items()) or "none of them is set"
        raise ConfigError(f"Set exactly one of {', '.join(choices)}; {said}.")
    own_reward = config.reward.function is not None
    if data.train_files is not None:
        path = str(Path(data.train_files).absolute())
        return TaskSpec(kind="files", name=path, prompt_key=data.prompt_key, own_reward=own_reward)
    [name] = chosen.values()
    if data.task is not None:
        kind, size, params = "object" if ":" in name else "built_in", 0, data.task_params
    else:
        kind, size, params = "reasoning_gym", data.reasoning_gym.size, data.reasoning_gym.params
    return TaskSpec(kind=kind, name=name, seed=data.seed, size=size, params=dict(params), own_reward=own_reward)


def build_task(spec: TaskSpec) -> Task:
    """The task itself. Raises ConfigError with one sentence on an unknown name or a wrong parameter."""
    if spec.kind == "files":
        from psrl.tasks.files import FileTask

        return FileTask(Path(spec.name), spec.prompt_key, check_sources=not spec.own_reward, key=spec.file_key)
    if spec.kind == "reasoning_gym":
        from psrl.tasks.reasoning_gym import ReasoningGymTask

        return ReasoningGymTask(spec.name, spec.size, spec.seed, spec.params)
    if spec.kind == "object":
        factory = import_object(spec.name, "data.task")
    elif spec.name in BUILT_IN:
        factory = BUILT_IN[spec.name]
    else:
        raise ConfigError(
            f"data.task={spec.name} is unknown: allowed are {', '.join(BUILT_IN)}, or your own as module:object."
        )
    if "seed" in spec.params:
        raise ConfigError(f"data.task_params.seed={spec.params['seed']} is set by data.seed: set that key instead.")
    try:
        task = factory(seed=spec.seed, **spec.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data.task={spec.name} refuses data.task_params={spec.params}: {error}.") from error
    if not isinstance(task, Task):
        raise ConfigError(
            f"data.task={spec.name} gave a {type(task).__name__}: a task has the methods items() and score(answer)."
        )
    return task


def import_object(name: str, key: str) -> Callable[..., Any]:
    """`module:attribute`. Raises ConfigError that names `key` if it cannot be imported or is not callable."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{key}={name} must read module:name, for example my_package.rewards:score.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"{key}={name}: importing {module_name} failed with {type(error).__name__}: {error}."
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        problem = "has no such name" if found is None else f"holds a {type(found).__name__}, which cannot be called"
        raise ConfigError(f"{key}={name}: {module_name} {problem}.")
    return found
