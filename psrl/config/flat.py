"""A nested configuration as dotted keys."""

from __future__ import annotations

from typing import Any


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings to dotted keys; empty mappings and lists are values. `flatten({"a": {"b": 1}}) == {"a.b": 1}`."""
    if isinstance(tree, dict) and (tree or not prefix):
        return {
            k: v
            for name, sub in tree.items()
            for k, v in flatten(sub, f"{prefix}.{name}" if prefix else str(name)).items()
        }
    return {prefix: tree}
