"""Where the configuration files lie. A file of its own: who reads one of them need not load Hydra."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """`conf/` beside the package in a checkout, inside it when installed from a wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
