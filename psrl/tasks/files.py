"""Prompts from a parquet or jsonl file in verl's columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psrl.config.errors import ConfigError
from psrl.tasks.base import Answer, TaskItem, user_message
from psrl.tasks.verifiers import VERIFIERS

SUFFIXES = (".parquet", ".jsonl")


class FileTask:
    """Rows with `prompt` (chat messages, or plain text), `data_source`, `reward_model.ground_truth`, `extra_info`.

    `check_sources`: refuse a data source that has no built-in verifier (used when no reward function is given). `key`: the
    configuration key that named the file.
    """

    def __init__(
        self, path: Path, prompt_key: str = "prompt", check_sources: bool = True, key: str = "data.train_files"
    ):
        self.path, self.prompt_key, self._check_sources, self._key = path, prompt_key, check_sources, key

    def items(self) -> Iterator[TaskItem]:
        """Raises ConfigError naming file and row for what cannot be read. Scoring never touches the file."""
        if not self.path.is_file():
            raise ConfigError(
                f"{self._key}={self.path} does not exist or is not a file: give a .parquet or .jsonl file."
            )
        if self.path.suffix not in SUFFIXES:
            raise ConfigError(
                f"{self._key}={self.path} ends with {self.path.suffix!r}: allowed are {' and '.join(SUFFIXES)}."
            )
        for number, row in enumerate(_rows(self.path)):
            yield self._item(number, row)

    def _item(self, number: int, row: dict[str, Any]) -> TaskItem:
        prompt = row.get(self.prompt_key)
        if isinstance(prompt, str):
            prompt = user_message(prompt)
        if (
            not isinstance(prompt, list)
            or not prompt
            or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
        ):
            have = f"it holds {prompt!r:.80}" if self.prompt_key in row else f"the row has only {', '.join(row)}"
            raise ConfigError(
                f"{self.path} row {number}: column {self.prompt_key!r} (data.prompt_key) must hold chat messages "
                f"with role and content, or a text; {have}."
            )
        source = str(row.get("data_source") or "")
        if self._check_sources and source not in VERIFIERS:
            raise ConfigError(
                f"{self.path} row {number}: data_source {source!r} has no built-in verifier: set "
                f"reward.function=module:function, or use one of {', '.join(VERIFIERS)}."
            )
        truth = (row.get("reward_model") or {}).get("ground_truth", row.get("ground_truth"))
        return TaskItem(
            messages=prompt,
            data_source=source,
            ground_truth=truth,
            extra_info=row.get("extra_info") or {},
            solution=str(truth) if isinstance(truth, str | int | float) else None,
        )

    def score(self, answer: Answer) -> float:
        """By the built-in verifier of the data source."""
        return VERIFIERS[answer.data_source](answer.solution_str, answer.ground_truth)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path} line {number + 1} is not JSON: {error}.") from error
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{path} line {number + 1} must hold an object with named columns, not {line.strip()[:60]!r}."
                )
            yield row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a readable parquet file: {error}.") from error
