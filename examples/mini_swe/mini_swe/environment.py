"""The environment: a working copy for each trajectory, a shell in it, hidden tests at the end."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mini_swe import outcomes
from mini_swe.repository import Repository, make_repository
from psrl.agents.base import AgentPrompt, Message
from psrl.agents.sandbox import Limits, run_program
from psrl.agents.tool_environment import ToolEnvironment

MAX_SOURCE_BYTES = 2**16


class Shell:
    """`shell(command)`: bash in the working copy; what it prints, and how it ended."""

    name = "shell"
    description = "Runs a bash command in the repository and returns what it prints."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "for example cat *.py"}},
        "required": ["command"],
    }

    def __init__(self, directory: Path, limits: Limits) -> None:
        self._directory, self._limits = directory, limits

    async def run(self, command: str) -> str:
        argv = ["bash", "-c", str(command)]
        done = await run_program(argv, cwd=self._directory, limits=self._limits)
        return f"{done.output.rstrip()}\n[{done.ended or 'exit code 0'}]".lstrip()


class SweEnvironment(ToolEnvironment):
    """`multi_turn.environment=mini_swe.environment:SweEnvironment`. Reward 1 if every hidden call turns out as it does in the
    mended module, else 0, however the trajectory ended.

    `timeout_s`, `max_memory_gb`: limits of a command; `max_output`: characters of it that the model sees.
    """

    def __init__(self, timeout_s: float = 10.0, max_memory_gb: float = 1.0, max_output: int = 1500) -> None:
        self._limits = Limits(timeout_s=timeout_s, memory_bytes=int(max_memory_gb * 2**30))
        self._place = tempfile.TemporaryDirectory(prefix="psrl-mini-swe-", ignore_cleanup_errors=True)
        self._directory = Path(self._place.name).resolve()
        self._repository: Repository | None = None
        super().__init__([Shell(self._directory, self._limits)], max_parallel_calls=4, max_response_length=max_output)

    async def reset(self, prompt: AgentPrompt) -> Sequence[Message]:
        self._repository = make_repository(prompt.extra_info["kind"], prompt.extra_info["seed"])
        for name, content in self._repository.files.items():
            (self._directory / name).write_text(content)
        return prompt.messages

    async def score(self) -> float:
        assert self._repository is not None, "reset comes first"
        source = _source(self._directory / self._repository.module)
        calls = list(self._repository.hidden)
        found = await _outcomes_of(source, calls, self._limits) if source is not None else None
        return float(found == outcomes.outcomes(self._repository.mended, calls))

    async def close(self) -> None:
        await asyncio.to_thread(self._place.cleanup)


def _source(path: Path) -> str | None:
    """The module as the agent left it; None if it is no ordinary file of ordinary size."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_SOURCE_BYTES:
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


async def _outcomes_of(source: str, calls: list[str], limits: Limits) -> list[str] | None:
    """How the calls turn out, found in a sandbox that is told the calls but not how they should: so nothing in the module can
    claim to have passed. None if the module does not get so far."""
    with tempfile.TemporaryDirectory(prefix="psrl-mini-swe-check-", ignore_cleanup_errors=True) as name:
        directory = Path(name).resolve()
        (directory / "module.txt").write_text(source, encoding="utf-8")
        argv = [sys.executable, "-I", "-B", outcomes.__file__, json.dumps(calls), "module.txt"]
        done = await run_program(argv, cwd=directory, limits=limits)
    try:
        return json.loads(done.output.splitlines()[-1]) if not done.ended else None
    except (IndexError, ValueError):
        return None
