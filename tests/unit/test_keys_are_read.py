"""A key that nothing reads does not exist: each is looked up by name somewhere outside of schema and refusals."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from psrl.config.help import documented_keys

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[2] / "psrl"
WHOLE_SECTIONS = ("data.task_params", "data.reasoning_gym.params")


def names_read() -> set[str]:
    """Names after a dot, and whole keys as text, in every file that does something with the configuration."""
    nodes = [
        node
        for file in PACKAGE.rglob("*.py")
        if not (file.parent.name == "config" and (file.name.endswith("checks.py") or file.name == "schema.py"))
        for node in ast.walk(ast.parse(file.read_text()))
    ]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return attributes | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_key_is_read_somewhere() -> None:
    read = names_read()
    names = {key: key.rpartition(".")[2] for key in documented_keys() if key not in WHOLE_SECTIONS}
    assert [key for key, name in names.items() if not {key, name} & read] == []
