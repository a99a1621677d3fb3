"""Every key with its type, default and meaning, read from the schema's own docstrings."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from dataclasses import dataclass
from typing import Any

from psrl.config import schema


@dataclass(frozen=True, slots=True)
class DocumentedKey:
    key: str
    type_name: str
    default: Any
    doc: str


_sections: dict[str, type] = {"": schema.Config}


def add_section(prefix: str, cls: type) -> None:
    """Document the keys of another dataclass too, for example those of a launcher under `hydra.launcher.`."""
    _sections[prefix] = cls
    documented_keys.cache_clear()


@functools.cache
def documented_keys() -> dict[str, DocumentedKey]:
    """Dotted key -> its documentation; `documented_keys()["psrl.staleness"].default == 0`."""
    entries: dict[str, DocumentedKey] = {}
    for prefix, cls in _sections.items():
        entries |= {entry.key: entry for entry in _walk(cls, prefix)}
    return entries


def render_help() -> str:
    """What `--help` prints."""
    lines = [
        "python -m psrl.launch [KEY=VALUE ...]            train here; the same run_dir= again resumes",
        "python -m psrl.launch -m KEY=V1,V2 [...]         a sweep: one run for each combination",
        "python -m psrl.launch -m hydra/launcher=submitit_slurm [...]   the same as jobs of Slurm, one a run",
        "python -m psrl.launch --cfg job [KEY=VALUE ...]  print the composed configuration",
        "",
        "model=tiny | smollm2_135m | /a/huggingface/directory        preset=laptop | cluster",
        "",
        "Keys (cluster defaults; preset=laptop makes sizes small):",
    ]
    section = ""
    for entry in documented_keys().values():
        head = entry.key.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", f"[{section}]" if section else "[run]"]
        default = "null" if entry.default is None else entry.default
        lines.append(f"  {entry.key} = {default}   ({entry.type_name})")
        if entry.doc:
            lines.append(f"      {entry.doc}")
    return "\n".join(lines)


def _walk(cls: type, prefix: str) -> list[DocumentedKey]:
    texts = _field_texts(cls.__module__)
    hints = typing.get_type_hints(cls)
    instance = cls()
    nested: list[DocumentedKey] = []
    plain: list[DocumentedKey] = []
    for item in [f for f in dataclasses.fields(cls) if not f.name.startswith("_")]:
        value = getattr(instance, item.name)
        key = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            nested += _walk(type(value), f"{key}.")
        else:
            plain.append(
                DocumentedKey(key, _type_name(hints[item.name]), value, texts.get((cls.__name__, item.name), ""))
            )
    return plain + nested


def _type_name(hint: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    args = typing.get_args(hint)
    if args and typing.get_origin(hint) not in (list, dict):
        return " or ".join(_type_name(a) for a in args)
    if typing.get_origin(hint) is list:
        return f"a list of {_type_name(args[0]).removeprefix('an ').removeprefix('a ')}s"
    if typing.get_origin(hint) is dict:
        return "a mapping"
    return names.get(hint, str(hint))


@functools.cache
def _field_texts(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal that follows the field, for the dataclasses of a module."""
    source = inspect.getsource(sys.modules[module])
    texts: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts[node.name, field.target.id] = " ".join(str(after.value.value).split())
    return texts
