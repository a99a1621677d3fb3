"""Arrows point one way: launch -> roles -> decisions -> configuration and messages. And what must stay light does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).resolve().parents[2] / "psrl"

ALLOWED = {
    "protocol": {"protocol"},
    "config": {"config"},
    "algorithms": {"algorithms"},
    "agents": {"agents", "sessions", "tasks", "supervisor", "config"},
    "agents/jail.py": set(),
    "rundir": {"rundir"},
    "net": {"net", "rundir", "protocol", "config"},
    "supervisor/process.py": {"supervisor"},
    "supervisor/children.py": {"supervisor"},
    "coordinator": {"coordinator", "protocol"},
    "cost_model/fit.py": {"protocol"},
    "cost_model/measure.py": {"protocol"},
    "cost_model/files.py": {"protocol", "config"},
    "host_memory.py": set(),
    "rollout/engines": {"rollout", "protocol", "host_memory"},
    "rollout/held_blocks.py": {"protocol"},
    "rollout/partial.py": {"protocol"},
    "rollout/group_work.py": {"rollout", "protocol"},
    "rollout/status_reports.py": {"protocol"},
    "sessions": {"sessions", "protocol", "models", "config", "rundir"},
    "weights/plan.py": {"weights", "protocol"},
    "weights/store.py": {"weights"},
    "trainer/micro_batches.py": {"algorithms"},
    "trainer/rows.py": set(),
    "trainer/chunks.py": {"protocol", "config"},
    "trainer/step_plan.py": {"trainer", "algorithms"},
    "trainer/overlap.py": {"trainer"},
    "trainer/pipeline.py": {"trainer", "algorithms", "config"},
    "trainer/batch.py": {"trainer", "algorithms", "protocol"},
    "trainer/step.py": {"trainer", "algorithms", "protocol", "config"},
    "trainer/backends": {"trainer", "algorithms", "config", "host_memory"},
}
SHELLS = {"coordinator/service.py", "rollout/engines/vllm_core.py"}
"""The one file of the coordinator that does I/O, and the one of the engines that has a process of its own."""

LIGHT = (
    "config",
    "protocol",
    "coordinator",
    "rundir",
    "net",
    "supervisor",
    "telemetry",
    "slurm",
    "cost_model",
    "simulate",
    "sessions",
)


def files(part: str) -> list[Path]:
    path = PACKAGE / part
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [f for f in found if f.relative_to(PACKAGE).as_posix() not in SHELLS]


def imported_parts(file: Path) -> set[str]:
    """First component below psrl of each import, those under TYPE_CHECKING left out."""
    parts: set[str] = set()
    tree = ast.parse(file.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        parts |= {name.split(".")[1] for name in names if name.startswith("psrl.")}
    return parts


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_lies_below_it(part: str) -> None:
    assert files(part), f"{part} is gone: take it off the list"
    for file in files(part):
        assert imported_parts(file) <= ALLOWED[part], file


def test_nothing_imports_the_front_door() -> None:
    for file in PACKAGE.rglob("*.py"):
        assert "launch" not in imported_parts(file), file


def test_light_parts_start_without_torch() -> None:
    modules = [
        "psrl." + f.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for part in LIGHT
        for f in sorted((PACKAGE / part).rglob("*.py"))
    ]
    modules += ["psrl.launch", "psrl.local", "psrl.prepare", "psrl.audit", "psrl.report", "psrl.rollout.agent_worker"]
    code = "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or "something among these imports torch"


def test_no_file_is_larger_than_one_idea() -> None:
    large = {
        f.relative_to(PACKAGE).as_posix(): n
        for f in PACKAGE.rglob("*.py")
        if (n := len(f.read_text().splitlines())) > 400
    }
    assert not large
