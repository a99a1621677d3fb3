"""A key that nothing reads does not exist: each is looked up by name somewhere outside of schema and refusals."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from psrl.config.help import documented_keys

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[2] / "psrl"
WHOLE_SECTIONS = ("data.task_params", "data.reasoning_gym.params")
SAID_AGAIN = tuple(
    f"psrl.rollout_coordination.redundant_rollout.{name}" for name in ("alg_global_batch_size", "alg_rollout_n")
)
"""What trains, beside what is launched for it: refused unless it equals the key that is read."""


def names_read() -> set[str]:
    """Names after a dot, and whole keys as text, in everything that does more with the configuration than refuse it."""
    read: set[str] = set()
    unread = [
        ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py") if file.name not in ("schema.py", "checks.py")
    ]
    while unread:
        node = unread.pop()
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith(("check", "refuse")):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            read.add(node.value)
        unread += ast.iter_child_nodes(node)
    return read


def test_every_key_is_read_somewhere() -> None:
    read = names_read()
    names = {key: key.rpartition(".")[2] for key in documented_keys() if key not in WHOLE_SECTIONS + SAID_AGAIN}
    assert [key for key, name in names.items() if not {key, name} & read] == []
