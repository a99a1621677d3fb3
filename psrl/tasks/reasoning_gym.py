"""reasoning-gym's procedural datasets, each with its own verifier. The first task imports the package (2 s)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from psrl.config.errors import ConfigError
from psrl.tasks.base import Answer, TaskItem, user_message


class ReasoningGymTask:
    """A dataset by name. An entry is generated again from its index wherever it is scored, so nothing of its metadata
    (which may hold any Python object) has to travel."""

    def __init__(self, dataset: str, size: int, seed: int, params: dict[str, Any]):
        self.name = dataset
        self._dataset = _create(dataset, size, seed, params)
        self._entry = lru_cache(maxsize=256)(self._dataset.__getitem__)

    def items(self) -> Iterator[TaskItem]:
        for index in range(len(self._dataset)):
            entry = self._entry(index)
            answer = entry["answer"]
            yield TaskItem(
                messages=user_message(entry["question"]),
                data_source=f"reasoning_gym/{self.name}",
                ground_truth=None if answer is None else str(answer),
                extra_info={"index": index},
                solution=None if answer is None else str(answer),
            )

    def score(self, answer: Answer) -> float:
        """What stands in the last <answer>...</answer>, else the whole response, judged by the dataset's verifier."""
        from reasoning_gym.utils import extract_answer

        given = extract_answer(answer.solution_str)
        if given is None:
            given = answer.solution_str.strip()
        return float(self._dataset.score_answer(given, self._entry(answer.extra_info["index"])))


def _create(name: str, size: int, seed: int, params: dict[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(
            f"data.reasoning_gym.dataset={name} needs the package reasoning-gym, which does not load ({error}): "
            "pip install reasoning-gym."
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {len(DATASETS)}, for example chain_sum."
        raise ConfigError(f"data.reasoning_gym.dataset={name} is not a reasoning-gym dataset: {hint}")
    own = {"seed": "data.seed", "size": "data.reasoning_gym.size"}
    allowed = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in own]
    for key in params:
        if key in own:
            raise ConfigError(f"data.reasoning_gym.params.{key} is set by {own[key]}: set that key instead.")
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(allowed)}."
            raise ConfigError(f"data.reasoning_gym.params.{key} is not a parameter of {name}: {hint}")
    try:
        return create_dataset(name, size=size, seed=seed, **params)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"reasoning-gym refuses {name} with size={size}, {params}: {error}.") from error
