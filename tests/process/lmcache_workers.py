"""Instances' LMCache in processes of their own, as a test drives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from psrl.rollout.cache_identity import cache_identity
from psrl.rollout.lmcache_messages import PullOrder
from psrl.rollout.lmcache_settings import LMCacheSettings

PROCESS = Path(__file__).with_name("lmcache_process.py")
CHUNK = 16
DEADLINE_S = 30.0
SMALL: dict[str, Any] = {"enable": True, "offload_size_gb": 0.02, "chunk_size": CHUNK}
N = cache_identity("run-a", 0, 1).kv_transfer_params
NEXT = cache_identity("run-a", 0, 2).kv_transfer_params
RESUMED = cache_identity("run-a", 1, 1).kv_transfer_params
OTHER_RUN = cache_identity("run-b", 0, 1).kv_transfer_params


def tokens(start: int, chunks: int = 4) -> list[int]:
    return list(range(start, start + chunks * CHUNK))


class Worker:
    """An instance's LMCache in a process of its own. `shared`: settings of `share_prefixes`."""

    def __init__(self, settings: LMCacheSettings, log: Path, shared: dict[str, Any] | None = None) -> None:
        self.log = log
        self.ends: dict[int, dict[str, Any]] = {}
        self.pulls = 0
        self.asking = threading.Lock()
        arguments = [json.dumps(settings.engine_config), *([json.dumps(shared)] if shared else [])]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(PROCESS), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | settings.environment,
            )

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-2000:]
        return json.loads(line)

    def ask(self, *command: object) -> Any:
        with self.asking:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            return self.answer()

    def store(self, ids: list[int], tags: dict[str, str], mark: float) -> None:
        assert self.ask("store", ids, tags, mark) == "stored"

    def hit(self, ids: list[int], tags: dict[str, str]) -> int:
        return self.ask("lookup", ids, tags)[0]

    def load(self, ids: list[int], tags: dict[str, str]) -> tuple[int, list[float]]:
        """Asks again until something is found: an answer that comes after the deadline helps the next one."""
        end = time.monotonic() + DEADLINE_S
        while True:
            hit, marks = self.ask("load", ids, tags)
            if hit or time.monotonic() > end:
                return hit, marks

    def order(self, ids: list[int], tags: dict[str, str], source: str, timeout_s: float = DEADLINE_S) -> int:
        """Have this prefix fetched; the pull's number."""
        pull = self.pulls = self.pulls + 1
        order = PullOrder(pull=pull, source=source, token_ids=ids, tags=tags, timeout_s=timeout_s)
        self._exchange([msgspec.to_builtins(order)])
        return pull

    def end(self, pull: int) -> dict[str, Any]:
        """How a pull ended, waiting for it."""
        until = time.monotonic() + 2 * DEADLINE_S
        while pull not in self.ends:
            assert time.monotonic() < until, f"pull {pull} has no end"
            time.sleep(0.005)
            self._exchange([])
        return self.ends[pull]

    def _exchange(self, orders: list[dict[str, Any]]) -> None:
        self.ends |= {end["pull"]: end for end in self.ask("psrl_pull_prefixes", orders, {})}

    def fetch(self, ids: list[int], tags: dict[str, str], source: str, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        return self.end(self.order(ids, tags, source, timeout_s))

    def held(self) -> dict[str, int]:
        return self.ask("held", [], {})

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still within: all its threads, which takes a busy machine a while."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            until = time.monotonic() + DEADLINE_S
            tasks = Path(f"/proc/{self.process.pid}/task")
            while not all(_state(task) == "T" for task in tasks.iterdir()):
                assert time.monotonic() < until
                time.sleep(0.01)
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
