"""Python, as a program of its own in a directory of its own that is gone afterwards."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from psrl.agents.sandbox import Limits, run_program


class PythonTool:
    """`python(code)`: each call begins anew; what the program prints is the answer."""

    name = "python"
    description = "Runs a Python program and returns what it prints. Nothing is kept from one call to the next."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program; print what you want to know"}},
        "required": ["code"],
    }

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    async def run(self, code: str) -> str:
        with tempfile.TemporaryDirectory(prefix="psrl-python-", ignore_cleanup_errors=True) as name:
            directory = Path(name).resolve()
            (directory / "program.py").write_text(str(code), encoding="utf-8", errors="replace")
            argv = [sys.executable, "-I", "-B", "program.py"]
            done = await run_program(argv, cwd=directory, limits=self._limits)
        return "\n".join(part for part in (done.output.rstrip(), f"[{done.ended}]" if done.ended else "") if part)
