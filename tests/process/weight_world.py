"""A run directory, and publishers and readers of weights around it as processes of their own (weight_role)."""

from __future__ import annotations

import json
import os
import select
import time
from pathlib import Path

from forked import fork_talking

from psrl.rundir.keys import create_keys
from psrl.rundir.layout import RunDir
from psrl.rundir.node_local import node_store_path

DEADLINE_S = 60.0


class Process:
    """A child that speaks JSON lines; every answer has a deadline."""

    def __init__(self, *args: object, **env: str) -> None:
        self.child = fork_talking("weight_role", [str(argument) for argument in args], env)
        self._rest = b""

    @property
    def pid(self) -> int:
        return self.child.pid

    def say(self, **command: object) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(command).encode() + b"\n")

    def hear(self) -> dict:
        """The next answer; lines that libraries print are passed over."""
        assert self.child.stdout is not None
        end = time.monotonic() + DEADLINE_S
        while True:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                if line.startswith(b"#"):
                    return json.loads(line[1:])
                continue
            if not select.select([self.child.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"{self.child.process.name} did not answer within {DEADLINE_S} s")
            data = os.read(self.child.stdout.fileno(), 65536)
            if not data:
                raise EOFError(f"{self.child.process.name} ended with {self.child.wait(10)}")
            self._rest += data

    def ask(self, **command: object) -> dict:
        self.say(**command)
        return self.hear()

    def server_pid(self) -> int:
        """Of the process that offers a publisher's host memory by NIXL; somebody must have read by that way."""
        return self.ask(server=True)["pid"]

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(10)


class World:
    """A run directory and the processes around it."""

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path)
        self.run_dir.create()
        create_keys(self.run_dir)
        self.processes: list[Process] = []
        self.stores = [node_store_path(path)]

    def publishers(self, channel: str, num_ranks: int, mib: int = 1, **env: str) -> list[Process]:
        started = [
            Process("publisher", channel, self.run_dir.path, rank, num_ranks, mib, **env) for rank in range(num_ranks)
        ]
        self.processes += started
        for process in started:
            assert process.hear()["ready"]
        return started

    def reader(self, channel: str, mib: int = 1, node: str = "", **env: str) -> Process:
        """On this node, or as if on another one that sees the run directory under a name of its own, and so has its own store."""
        path = self.run_dir.path
        if node:
            path = path.with_name(f"{path.name}-on-{node}")
            path.symlink_to(self.run_dir.path)
            self.stores.append(node_store_path(path))
        process = Process("reader", channel, path, mib, **env)
        self.processes.append(process)
        assert process.hear()["ready"]
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for store in self.stores:
            store.unlink(missing_ok=True)


def publish(publishers: list[Process], version: int, incarnation: int = 0) -> None:
    for process in publishers:
        process.say(publish=[version, incarnation])
    for process in publishers:
        process.hear()


def soon(seconds: float = DEADLINE_S) -> float:
    return time.monotonic() + seconds
