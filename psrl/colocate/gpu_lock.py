"""Who may use a node's GPUs: one lock a GPU, which the kernel gives back when its holder dies, however that happens."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

POLL_S = 0.005


class TurnError(RuntimeError):
    """A GPU was not given up in time; the text names it and its holder."""


class GpuLock:
    """The exclusive right to `gpus` (names on this node), all of them or none, so that no two processes wait for each other.

    A lock is a file in `directory` that both sides of the run on this node see. Children that inherit the descriptor (an
    engine's own processes) keep the lock until they are gone too: so does the memory that they hold.
    """

    def __init__(self, directory: Path, gpus: Sequence[str], owner: str) -> None:
        self.gpus = tuple(gpus)
        self.held = False
        self._owner = owner
        self._paths = [directory / f"gpu-{gpu}.turn" for gpu in self.gpus]
        self._files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in self._paths]

    def try_acquire(self) -> bool:
        """Take all GPUs if they are free at this moment. True also when they are held already."""
        taken: list[int] = []
        for file in () if self.held else self._files:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                for other in taken:
                    fcntl.flock(other, fcntl.LOCK_UN)
                return False
            taken.append(file)
        for file in taken:
            os.ftruncate(file, 0)
            os.pwrite(file, f"{self._owner} (pid {os.getpid()})".encode(), 0)
        self.held = True
        return True

    def acquire(
        self,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wait for all GPUs. TurnError after `limit_s`."""
        deadline = clock() + limit_s
        while not self.try_acquire():
            if clock() >= deadline:
                raise self.overdue(limit_s)
            sleep(POLL_S)

    def release(self) -> None:
        for file in self._files if self.held else ():
            fcntl.flock(file, fcntl.LOCK_UN)
        self.held = False

    def overdue(self, limit_s: float) -> TurnError:
        """What to raise when the GPUs did not become free within `limit_s`."""
        holders = sorted({holder for path in self._paths if (holder := path.read_text()) and self._owner not in holder})
        return TurnError(
            f"GPU {', '.join(self.gpus)} was not free for {self._owner} within psrl.fault_tolerance.turn_timeout_s={limit_s:g} s: last held by "
            f"{', '.join(holders) or 'nobody that is known'}"
        )

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files, self.held = [], False


def own_gpus(names: Sequence[str], first: int, count: int) -> list[str]:
    """The `count` GPUs of a process: those that it sees first. Places of the node, from `first` on, where it sees none.

    >>> own_gpus(("3", "0", "1", "2"), first=1, count=1), own_gpus((), first=1, count=2)
    (['3'], ['cpu-1', 'cpu-2'])
    """
    return list(names[:count]) or [f"cpu-{first + i}" for i in range(count)]


def turn_directory() -> Path:
    """The run's own directory on this node: supervisors make it, and set TMPDIR of all roles to it."""
    return Path(tempfile.gettempdir())
