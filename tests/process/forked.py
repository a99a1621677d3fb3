"""The tests' own programs as processes that have torch and transformers already: forked from a server that imported them once.

To import them costs seconds of a core before anything is done, and the tests start hundreds of processes. A forked one has its
own pid, environment and signals. CUDA does not survive a fork, so for a GPU a process is started from nothing.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

IMPORTED = [
    "psrl.trainer.backends.make",
    "psrl.trainer.replay",
    "psrl.weights.channel.nixl_publisher",
    "psrl.weights.channel.nixl_puller",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]
"""By the server. With OMP_NUM_THREADS=1 (tests/conftest.py) they start no thread, which a fork would lose."""


class Forked:
    """A process, with the verbs of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess, stdin: BinaryIO | None, stdout: BinaryIO | None) -> None:
        self.process = process
        self.stdin, self.stdout = stdin, stdout

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code (-9: it was killed), None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process.name), timeout)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def fork(
    script: str, arguments: Sequence[str], env: Mapping[str, str], output: Path, errors: Path, *, on_gpu: bool = False
) -> Forked:
    """Run `main(*arguments)` of the module `script` in this directory, with `env` on top of this process's environment. What
    it prints goes into two files."""
    return Forked(_start(script, arguments, env, {1: output, 2: errors}, on_gpu), None, None)


def fork_talking(script: str, arguments: Sequence[str], env: Mapping[str, str]) -> Forked:
    """The same as somebody to talk to: its stdin and stdout are pipes."""
    theirs_in, ours_out = mp.Pipe(duplex=False)
    ours_in, theirs_out = mp.Pipe(duplex=False)
    process = _start(script, arguments, env, {0: theirs_in, 1: theirs_out})
    theirs_in.close()
    theirs_out.close()
    stdin, stdout = (os.dup(end.fileno()) for end in (ours_out, ours_in))
    ours_out.close()
    ours_in.close()
    return Forked(process, os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0))


Streams = Mapping[int, Path | Connection]


def _start(
    script: str, arguments: Sequence[str], env: Mapping[str, str], streams: Streams, on_gpu: bool = False
) -> BaseProcess:
    context = mp.get_context("spawn" if on_gpu else "forkserver")
    context.set_forkserver_preload(IMPORTED)
    arguments_of_run = (script, list(arguments), {**os.environ, **env}, streams)
    process: BaseProcess = context.Process(target=_run, args=arguments_of_run, name=script, daemon=True)  # type: ignore[attr-defined]
    process.start()
    return process


def _run(script: str, arguments: list[str], env: Mapping[str, str], streams: Streams) -> None:
    for number, end in streams.items():
        if isinstance(end, Path):
            os.dup2(os.open(end, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        else:
            os.dup2(end.fileno(), number)
            end.close()
    sys.stdin = os.fdopen(os.dup(0))  # multiprocessing had put an empty one there
    os.environ.clear()
    os.environ.update(env)
    importlib.import_module(script).main(*arguments)
