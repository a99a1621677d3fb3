"""Names that must be the same in every process of a run, whatever the user's environment says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from psrl.protocol.blocks import block_names
from psrl.rundir.layout import RunDir
from psrl.supervisor.node import role_environment

pytestmark = pytest.mark.unit

IDS = [5, 6, 7, 8, 9, 151_643, 0, 1]
NAMES = f"from psrl.protocol.blocks import block_names; print(block_names({IDS}, 2), hash('a text'))"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("PSRL_NODE_LOCAL", str(tmp_path))
    return RunDir(tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "seed"), [(None, "0"), ("", "0"), ("random", "0"), ("-1", "0"), ("0", "0"), ("7", "7")]
)
def test_roles_hash_alike(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, given: str | None, seed: str) -> None:
    if given is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    assert role_environment(run_dir)["PYTHONHASHSEED"] == seed


def told(environment: dict[str, str]) -> str:
    """What a process says of block names and of a text's hash."""
    environment = environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", NAMES], env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    return done.stdout


def test_two_roles_give_a_block_the_same_name(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    one, two = (told(role_environment(run_dir)) for _ in range(2))
    assert one == two and one.startswith(str(block_names(IDS, 2)))


def test_names_of_blocks_do_not_depend_on_the_hash_seed() -> None:
    names = [told(dict(os.environ) | {"PYTHONHASHSEED": seed}).split("]")[0] for seed in ("1", "2")]
    assert names == [str(block_names(IDS, 2)).rstrip("]")] * 2
