"""Cost models as JSON: {"TP1_PP1": {five coefficients}, ...}, one entry for each way to split the model over GPUs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from psrl.config.conf_dir import conf_dir
from psrl.config.errors import ConfigError
from psrl.protocol.cost_model import CostModel

COEFFICIENTS = tuple(f.name for f in fields(CostModel))
_KEY = re.compile(r"TP[1-9]\d*_PP[1-9]\d*")


def parallel_key(tensor_parallel: int = 1, pipeline_parallel: int = 1) -> str:
    """`parallel_key(2) == "TP2_PP1"`"""
    return f"TP{tensor_parallel}_PP{pipeline_parallel}"


def shipped_cost_models() -> dict[str, Path]:
    """Name and file of each cost model that comes with psrl."""
    return {path.stem: path for path in sorted((conf_dir() / "cost_model").glob("*.json"))}


def load_cost_model(name: str | Path, key: str) -> CostModel:
    """The entry `key` ("TP1_PP1") of a JSON file or of a shipped cost model (`qwen_7b`).

    A word without a slash or suffix is a shipped name. Raises ConfigError with one sentence that says what is wrong and
    what there is instead.
    """
    models = load_cost_models(name)
    if key not in models:
        raise ConfigError(
            f"The cost model {name} has no entry {key}, only {', '.join(models)}: measure it with `python -m psrl.cost_model fit --key {key}`."
        )
    return models[key]


def load_cost_models(name: str | Path) -> dict[str, CostModel]:
    """All entries of a file or of a shipped cost model; at least one."""
    path = _find(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The cost model {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"The cost model {path} is not JSON: {error}.") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f'The cost model {path} must be an object with at least one entry such as "TP1_PP1".')
    return {key: _entry(path, key, value) for key, value in content.items()}


def save_cost_model(path: Path, key: str, model: CostModel) -> None:
    """Write `model` as the entry `key` of the file; other entries of a file that exists stay."""
    check_key(key)
    models = load_cost_models(path.absolute()) if path.exists() else {}
    content = {name: asdict(m) for name, m in sorted({**models, key: model}.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(f".{path.name}.tmp")
    incoming.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    incoming.replace(path)


def check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f'The key {key} is refused: write "TP<tensor parallel>_PP<pipeline parallel>", as in TP1_PP1.'
        )


def _find(name: str | Path) -> Path:
    path, shipped = Path(name).expanduser(), shipped_cost_models()
    if str(name) in shipped:
        return shipped[str(name)]
    if not path.is_file():
        raise ConfigError(
            f"The cost model {name} is neither a file nor a shipped name: give the path of a JSON file, or one of {', '.join(shipped)}."
        )
    return path


def _entry(path: Path, key: str, value: Any) -> CostModel:
    where = f"The cost model {path}, entry {key},"
    if not _KEY.fullmatch(key):
        raise ConfigError(f'{where} is not named like "TP1_PP1".')
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be an object with the numbers {', '.join(COEFFICIENTS)}.")
    for name in COEFFICIENTS:
        if name not in value:
            raise ConfigError(f"{where} lacks {name}: each entry has {', '.join(COEFFICIENTS)}.")
    for name, number in value.items():
        if name not in COEFFICIENTS:
            raise ConfigError(f"{where} has an unknown field {name}: allowed are {', '.join(COEFFICIENTS)}.")
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise ConfigError(f"{where} has {name}={number!r}: it must be a number of seconds, at least 0.")
    model = CostModel(**{name: float(value[name]) for name in COEFFICIENTS})
    if not model.latency_s(1, 0) > 0:
        raise ConfigError(
            f"{where} gives a step of one sequence no time at all: other_threshold or another must be above 0."
        )
    return model
