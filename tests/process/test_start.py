"""`python -m psrl.start`: how a supervisor starts a role."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import psrl

pytestmark = pytest.mark.process

ROLE = """
import gc, sys
from psrl.role import run_role

while_loading = gc.isenabled()

def main():
    print(__name__, sys.argv[1:], while_loading, gc.isenabled(), gc.get_freeze_count() > 0)
    return 3

if __name__ == "__main__":
    run_role(main)
"""


def test_the_module_is_the_program_and_is_loaded_without_garbage_collections(tmp_path: Path) -> None:
    (tmp_path / "a_role.py").write_text(ROLE)
    path = os.pathsep.join([str(tmp_path), str(Path(psrl.__file__).parent.parent)])
    command = [sys.executable, "-m", "psrl.start", "a_role", "RUN_DIR", "NAME"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (3, "__main__ ['RUN_DIR', 'NAME'] False True True"), done.stderr
