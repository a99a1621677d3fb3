"""Whole runs as fixtures; nothing is left of a run when its test has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from runs import NewRun, Run
from weight_world import World


@pytest.fixture
def new_run(tiny_model: Path, tmp_path: Path) -> Iterator[NewRun]:
    """`new_run(overrides, name)`: a run that is not started yet. Modules in tmp_path can be imported by its rewards."""
    runs: list[Run] = []

    def make(overrides: Mapping[str, object] | None = None, name: str = "run") -> Run:
        run = Run(tmp_path / name, {"model": tiny_model, **(overrides or {})}, module_dir=tmp_path)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A run directory, and processes around it that end with the test."""
    made = World(tmp_path / "run")
    yield made
    made.close()
