"""Programs that a model wrote: run with limits, by deadline, and with nothing of them left afterwards.

docs/agents.md says what this keeps apart and what it does not. Where the kernel refuses the namespaces, programs still have their
limits, but see the host's files and network; that is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from psrl.agents import jail
from psrl.config.agents import SandboxConfig
from psrl.supervisor.process import describe_exit

log = logging.getLogger("psrl.agents")
OOM_SCORE_ADJ = 900
"""The kernel ends such a program before anything else of the run."""
AFTER_KILL_S = 5.0
MARK = "PSRL_SANDBOX"
"""In the environment of a program and, unless it takes pains, of all that it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: not limited."""

    timeout_s: float = 10.0
    memory_bytes: int | None = 2**30
    """Address space of each process."""
    cpu_s: int | None = None
    """CPU time of each process: a last resort behind the deadline."""
    processes: int | None = 32
    file_bytes: int | None = 2**26
    """Of each file that is written."""
    open_files: int | None = 256
    output_bytes: int = 2**16
    """Kept of stdout and stderr together; what is in the middle of more is thrown away."""
    hidden: tuple[str, ...] = ()
    """Directories that look empty from inside."""

    @staticmethod
    def from_config(config: SandboxConfig, hidden: Sequence[str] = ()) -> Limits:
        return Limits(
            timeout_s=config.timeout_s,
            memory_bytes=int(config.max_memory_gb * 2**30),
            cpu_s=4 * math.ceil(config.timeout_s),  # threads count together
            processes=config.max_processes,
            file_bytes=int(config.max_file_mb * 2**20),
            hidden=tuple(hidden),
        )

    def rlimits(self) -> dict[str, int]:
        """Those that the kernel keeps for each process."""
        limits = {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }
        return {name: value for name, value in limits.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a program. `ended` is "" for exit code 0, else its exit code, its signal or the limit that it met."""

    ended: str
    output: str


async def run_program(
    argv: Sequence[str], *, cwd: Path, limits: Limits, env: Mapping[str, str] | None = None, isolated: bool = True
) -> Finished:
    """Run `argv` in `cwd`, with an environment of its own (`env` comes on top) and an empty stdin.

    `isolated`: files outside `cwd` are read-only and there is no network, where the kernel allows that. Everything that
    the program started has ended when this returns or is cancelled.
    """
    mark = secrets.token_hex(8)
    isolated = isolated and why_no_namespaces() is None
    # A pipe of our own: asyncio's counts as part of the process, which then ends only when all that it started has.
    outgoing, incoming = os.pipe()
    output = HeadAndTail(limits.output_bytes)
    reading = asyncio.create_task(_read(outgoing, output))
    try:
        process = await asyncio.create_subprocess_exec(
            *jailed(argv, cwd, limits, isolated),
            cwd=cwd,
            env={**program_environment(cwd), **(env or {}), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=incoming,
            stderr=incoming,
            start_new_session=True,
        )
    finally:
        os.close(incoming)
    code: int | None = None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.timeout_s):
                code = await process.wait()
    finally:
        kill_all(process.pid, mark, escapes=not isolated)
        await asyncio.wait({reading, asyncio.create_task(process.wait())}, timeout=AFTER_KILL_S)
        reading.cancel()
    return Finished(_ended(code, limits, isolated), output.text())


def jailed(argv: Sequence[str], cwd: Path, limits: Limits, isolated: bool) -> list[str]:
    """The command that starts `argv` within its limits."""
    rlimits = limits.rlimits()
    if (
        limits.processes is not None and not isolated
    ):  # the guard of a namespace counts better: this one counts the whole user
        rlimits["RLIMIT_NPROC"] = _tasks_of_this_user() + limits.processes
    settings = {
        "parent": os.getpid(),
        "oom_score_adj": OOM_SCORE_ADJ,
        "isolated": isolated,
        "writable": str(cwd),
        "hidden": [d for d in limits.hidden if Path(d).is_dir() and not cwd.is_relative_to(d)],
        "max_processes": limits.processes or 2**22,
        "rlimits": rlimits,
    }
    return [sys.executable, "-IS", jail.__file__, json.dumps(settings), *argv]


def program_environment(cwd: Path) -> dict[str, str]:
    """Nothing of ours (tokens, proxies, Slurm) but the way to programs."""
    home = str(cwd)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


@functools.cache
def why_no_namespaces() -> str | None:
    """Why programs cannot be isolated here, or None if they can. Tried once in a process, which takes 0.1 s."""
    with tempfile.TemporaryDirectory(prefix="psrl-sandbox-") as directory:
        command = jailed(["true"], Path(directory), Limits(), True)
        try:
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired:
            reason = "no answer within 30 s"
        else:
            reason = (done.stderr.strip() or describe_exit(done.returncode)) if done.returncode else ""
    if reason:
        log.warning("sandbox: programs see this host's files and network, the kernel gives no namespaces: %s", reason)
    return reason or None


def kill_all(leader: int, mark: str, *, escapes: bool) -> None:
    """SIGKILL the process group, and with `escapes` whoever left it with our mark in the environment. In a PID namespace none
    can leave. The leader must not have been reaped unless it has ended by itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    empty_looks = 0
    while escapes and empty_looks < 2:  # one look misses who forks and ends during it, or is just being executed
        marked = processes_with(mark)
        empty_looks = 0 if marked else empty_looks + 1
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def processes_with(mark: str) -> list[int]:
    """Living processes with our mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's; a zombie's environment is empty
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _tasks_of_this_user() -> int:
    """Processes and threads: what RLIMIT_NPROC is compared with."""
    tasks, uid = 0, os.getuid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    tasks += len(os.listdir(entry / "task"))  # noqa: PTH208 (names are not needed)
    return tasks


def _ended(code: int | None, limits: Limits, isolated: bool) -> str:
    if code is None:
        return f"killed after {limits.timeout_s:g} s"
    if isolated and code > 128:
        code = 128 - code
    if isolated and code == jail.EXIT_TOO_MANY:
        return f"killed with more than {limits.processes} processes"
    return describe_exit(code) if code else ""


async def _read(descriptor: int, output: HeadAndTail) -> None:
    """Read until everybody has closed the other end."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", 0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while chunk := await reader.read(2**16):
            output.add(chunk)
    finally:
        transport.close()


class HeadAndTail:
    """Keeps `limit` bytes of any amount: the first half of them and the last."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head, self._tail, self._dropped = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if (excess := len(self._tail) - self._half) > 0:
            del self._tail[:excess]
            self._dropped += excess

    def text(self) -> str:
        middle = f"\n... {self._dropped} bytes ...\n" if self._dropped else ""
        return self._head.decode(errors="replace") + middle + self._tail.decode(errors="replace")
