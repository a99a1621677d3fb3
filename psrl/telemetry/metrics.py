"""The metrics file: one JSON line a training step. What a dashboard, the progress line and the report are made from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

STEP_KEY = "training/global_step"
TIME_KEY = "_timestamp"
"""Unix seconds at which a row was written; wandb knows this name too."""

Row = dict[str, Any]


class MetricsWriter:
    """Appends one line a step to `path` and hands it to the operating system at once.

    Opening a file whose last line is torn (its writer was killed) ends that line first, so a resumed run never
    glues its first row to the wreck. NaN and infinities are written as null: they are not JSON, and a gap in a plot
    tells the truth.
    """

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _is_torn(path)
        self._file = path.open("ab")
        self._wall = wall
        if torn:
            self._file.write(b"\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append `row`. Raises ValueError without an integer `training/global_step`, TypeError on a value that is no
        number, text, list or dict of these (numpy and torch scalars are numbers)."""
        step = row.get(STEP_KEY)
        if isinstance(step, bool) or not isinstance(_plain(STEP_KEY, step), int):
            raise ValueError(f"a metrics row needs an integer {STEP_KEY!r}, got {step!r}")
        plain = {key: _plain(key, value) for key, value in row.items()}
        plain.setdefault(TIME_KEY, round(self._wall(), 3))
        self._file.write(json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class MetricsTail:
    """Follows a metrics file that another process writes; `poll` gives the whole rows that are new, in file order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[Row]:
        """A line counts once its newline is there; a missing file has no rows yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(parse_rows(whole.splitlines()))


def read_metrics(path: Path) -> list[Row]:
    """Rows of the surviving history in step order, each step once. A missing file has none; torn lines are skipped.

    A resumed run repeats the steps after its checkpoint. The later row wins, and rows of the abandoned history beyond
    it go too: steps written 1 2 3 4 | 3 give 1 2 3, not 1 2 3 4 with a 4 of another past.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return surviving(parse_rows(lines))


def surviving(rows: Iterable[Row]) -> list[Row]:
    """Each step once, last wins; a step that comes again takes back everything after it (see `read_metrics`)."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1][STEP_KEY] >= row[STEP_KEY]:
            kept.pop()
        kept.append(row)
    return kept


def number(row: Mapping[str, Any], key: str) -> float | None:
    """`row[key]` as a float; None when it is missing, null or no number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def parse_rows(lines: Iterable[bytes]) -> Iterable[Row]:
    """The rows that these lines hold, in their order; torn lines are skipped."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # torn: its writer was killed in the middle of it
            continue
        if isinstance(row, dict) and isinstance(row.get(STEP_KEY), int):
            yield row


def _plain(key: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(f"{key}.{k}", v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, v) for v in value]
    if hasattr(value, "item"):  # a numpy or torch scalar, without importing either
        return _plain(key, value.item())
    kind = type(value).__name__
    raise TypeError(f"metric {key!r} is of type {kind}; allowed are numbers, text, lists and dicts of these")


def _is_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                return False
            file.seek(size - 1)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
