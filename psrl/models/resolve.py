"""Which model a run trains, as a directory on this node, and what generation must know of it. Imports no torch."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from psrl.config.backend_checks import check_model_layout
from psrl.config.engine_checks import check_engine_model
from psrl.config.errors import ConfigError
from psrl.config.model_checks import HF, SMOLLM2, TINY
from psrl.config.schema import Config
from psrl.models.tokenizer import load_tokenizer
from psrl.rundir.layout import RunDir
from psrl.rundir.publish import publish, read_published
from psrl.tasks.prepare import context_length
from psrl.tasks.registry import build_task, task_spec
from psrl.tasks.validation import training_task

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
PRACTICE_SEED = 1_000_003
"""Added to data.seed for the warm start's own items."""


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A Hugging Face directory with weights in safetensors."""

    path: Path
    eos_token_ids: tuple[int, ...]
    """Every token that ends a response: of generation_config.json, config.json and the tokenizer."""
    pad_token_id: int
    context: int | None
    """The model's own max_position_embeddings."""


class _Record(msgspec.Struct, kw_only=True):
    name: str
    path: str | None


def resolve_model(
    config: Config, run_dir: RunDir, *, before_training: Callable[[Path], None] = lambda directory: None
) -> ModelSource:
    """Find or make the configured model, and leave a note in the run directory for `run_model`.

    model.path wins; tiny is made once in the run directory, smollm2_135m once a node and user. Doing it again is cheap.
    `check_model_choice` has let it pass. Raises ConfigError with one sentence if it is not there or does not fit.
    `before_training` sees a tiny model's directory when all but the weights is there, and may refuse it: its warm start takes
    seconds that are better not spent in vain.
    """
    name = HF if config.model.path is not None else config.model.name
    if name == TINY:
        record = _Record(name=TINY, path=str(_tiny(config, run_dir, before_training)))
    elif name == SMOLLM2:
        record = _Record(name=SMOLLM2, path=None)  # every node has its own copy
    else:
        assert config.model.path is not None, name
        record = _Record(name=HF, path=str(_checked(Path(config.model.path).expanduser().absolute())))
    source = _find(record)
    _refuse_unfit(source, config)
    note = _note(run_dir)
    if not note.exists():
        publish(note, msgspec.json.encode(record))
    return source


def check_model(config: Config) -> None:
    """What can be told of the configured model without a run directory. ConfigError if a run would refuse it."""
    if config.model.path is not None:
        _refuse_unfit(describe_model(Path(config.model.path).expanduser().absolute()), config)


def run_model(run_dir: RunDir) -> ModelSource:
    """The model of a run that `resolve_model` prepared, on whatever node this is."""
    return _find(msgspec.json.decode(read_published(_note(run_dir)), type=_Record))


def describe_model(path: Path) -> ModelSource:
    """What generation must know of a model directory. Raises ConfigError if the directory is none or is incomplete."""
    _checked(path)
    settings, generation = _json(path / "config.json"), _json(path / "generation_config.json")
    text = settings.get("text_config") or settings
    tokenizer = load_tokenizer(path)
    ids = [*_ids(generation.get("eos_token_id")), *_ids(text.get("eos_token_id")), *_ids(tokenizer.eos_token_id)]
    if not ids:
        raise ConfigError(
            f"The model in {path} names no end-of-text token: set eos_token_id in its generation_config.json."
        )
    pad = [*_ids(tokenizer.pad_token_id), *_ids(text.get("pad_token_id")), ids[0]]
    return ModelSource(
        path=path,
        eos_token_ids=tuple(dict.fromkeys(ids)),
        pad_token_id=pad[0],
        context=text.get("max_position_embeddings"),
    )


def make_directory_once(final: Path, fill: Callable[[Path], None]) -> Path:
    """`final`, made by `fill` in a sibling and renamed into place: it is whole or not there. If another process was
    faster, its directory is used."""
    if final.is_dir():
        return final
    incoming = final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")
    incoming.mkdir(parents=True, mode=0o700)
    try:
        fill(incoming)
        try:
            incoming.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return final


def _tiny(config: Config, run_dir: RunDir, before_training: Callable[[Path], None]) -> Path:
    def check(directory: Path) -> None:
        _refuse_shape(directory, config)
        before_training(directory)

    def build(directory: Path) -> None:
        from psrl.models.tiny import build_tiny

        spec = task_spec(config)
        task, practice = build_task(spec), build_task(spec.with_seed(spec.seed + PRACTICE_SEED))
        practice = training_task(config, practice)  # what is held out for validation is not practised either
        context = context_length(config)
        build_tiny(config.model.tiny, task, practice, directory, context, before_training=check)

    return make_directory_once(run_dir.path / "model", build)


def _find(record: _Record) -> ModelSource:
    if record.name == SMOLLM2:
        from psrl.models.smollm2 import cached_smollm2

        return describe_model(cached_smollm2())
    assert record.path is not None
    return describe_model(Path(record.path))


def _checked(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(
            f"model.path={path} is not a directory: give a Hugging Face model directory that every node can read."
        )
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if next(path.glob("*.safetensors"), None) is None:
        missing.append("weights (*.safetensors)")
    if missing:
        raise ConfigError(
            f"model.path={path} lacks {', '.join(missing)}: give a Hugging Face model directory with safetensors."
        )
    return path


def _refuse_unfit(source: ModelSource, config: Config) -> None:
    _refuse_short_context(source, config)
    _refuse_shape(source.path, config)


def _refuse_shape(directory: Path, config: Config) -> None:
    settings = _json(directory / "config.json")
    model = settings.get("text_config") or settings
    check_model_layout(config, model)
    check_engine_model(config, model)


def _refuse_short_context(source: ModelSource, config: Config) -> None:
    wanted = context_length(config)
    if source.context is not None and wanted > source.context:
        raise ConfigError(
            f"The model reads at most {source.context} tokens, but {wanted} are asked for: lower "
            "data.max_prompt_length, data.max_response_length or gen_actor_rollout_ref.rollout.max_model_len."
        )


def _note(run_dir: RunDir) -> Path:
    return run_dir.data / "model.json"


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error


def _ids(value: Any) -> list[int]:
    """An id, a list of ids or nothing."""
    return [] if value is None else list(value) if isinstance(value, list) else [value]
