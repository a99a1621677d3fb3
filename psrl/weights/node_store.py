"""What one instance of a node has fetched over the network, for all of them: copies of the trainers' slots in /dev/shm.

There is no server behind it. Whoever needs a version locks the store, and fetches it if it is not there yet; the others find
it whole when they get the lock, and copy what they need without it. If the one that fetches dies, the kernel lets go of its
lock; if it stops, the next one takes a new store after a while. A slot begins with the header that it has at its trainer, put
there last: readers judge it as they judge the trainer's own.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from psrl.host_memory import map_file, register_host, reserve_pages, unregister_host
from psrl.weights.memory import PAGE

PATIENCE_S = 10.0
"""Whoever holds the lock and moves nothing for so long is left alone with its store."""
_LOOK_S = 0.002


class NodeStore:
    """Two slots a trainer rank, one for even versions and one for odd ones. `registered`: with CUDA."""

    def __init__(self, path: Path, registered: bool) -> None:
        self._path, self._registered = path, registered
        self._fd = -1
        self._sizes: tuple[int, ...] = ()
        self.segment = torch.empty(0, dtype=torch.uint8)
        """All of the store, mapped; another tensor whenever another store is taken."""

    @contextmanager
    def alone(self, sizes: Sequence[int], check_time: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of a store for slots of `sizes` bytes, one for each rank. `check_time` raises when it is too late."""
        self._sizes = tuple(sizes)
        size = PAGE + 2 * sum(map(_paged, sizes))
        seen, since_s = -1, time.monotonic()
        while not self._try_lock(size):
            check_time()
            moved = int.from_bytes(os.pread(self._fd, 8, 0), "little")
            if moved != seen:
                seen, since_s = moved, time.monotonic()
            if time.monotonic() - since_s >= PATIENCE_S:
                self.leave()
                seen, since_s = -1, time.monotonic()
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def slot(self, version: int, rank: int) -> torch.Tensor:
        """Where this version of this rank lies: header, then payload."""
        start = PAGE + sum(2 * _paged(size) for size in self._sizes[:rank]) + version % 2 * _paged(self._sizes[rank])
        return self.segment[start : start + self._sizes[rank]]

    def moved(self) -> None:
        """Whoever holds the lock says that it is alive."""
        count = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        os.pwrite(self._fd, (count + 1).to_bytes(8, "little"), 0)

    def leave(self) -> None:
        """Take another store from now on: somebody may go on writing into this one. Everybody else does so, too."""
        if self._is_current():
            self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            if self._registered and self.segment.numel():
                unregister_host(self.segment)
            os.close(self._fd)
            self._fd, self.segment = -1, torch.empty(0, dtype=torch.uint8)

    def _try_lock(self, size: int) -> bool:
        if not self._is_current():
            self.close()
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not self._is_current():  # somebody has taken a new one meanwhile
            return False
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{self._path} belongs to user {found.st_uid}, not to user {os.geteuid()}")
        if found.st_size not in (0, size):  # of other weights
            self.leave()
            return False
        reserve_pages(self._fd, size)
        if self.segment.numel() != size:
            self.segment = map_file(self._fd, size)
            if self._registered:
                register_host(self.segment)
        return True

    def _is_current(self) -> bool:
        """The store that is open here is the one that others find."""
        if self._fd < 0:
            return False
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        here = os.fstat(self._fd)
        return (found.st_dev, found.st_ino) == (here.st_dev, here.st_ino)


def _paged(size: int) -> int:
    return -(-size // PAGE) * PAGE
