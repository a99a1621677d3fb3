"""GPU memory that a process gives up for the other side's turn and takes again for its own, with what was in it.

Buffers that other processes read (published weights) are not part of it: they stay where they are, registered once.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from psrl.colocate.gpu_lock import TurnError

log = logging.getLogger("psrl.colocate")

FREE_WAIT_S = 30.0
"""The driver frees a dead process's memory a little later than its locks."""
HEADROOM_BYTES = 2**28


class Memory(Protocol):
    def region(self) -> AbstractContextManager[None]:
        """What is allocated inside, and only that, may be released later."""
        ...

    def pause(self) -> None:
        """Release it; the content is kept elsewhere. Tensors must not be touched until `resume`."""
        ...

    def resume(self) -> None:
        """Take it again, with its content. TurnError if the GPU has no room for it."""
        ...


class NoMemory:
    """There is nothing to release: the process works on the CPU."""

    def region(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class HostCopies:
    """Moves the storage of `tensors()` to pinned host memory and back. The tensors stay the same objects, views of one
    storage included; their addresses change. The host copies are made once and used again."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._copies: dict[int, torch.Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def region(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self) -> None:
        before = free_bytes()
        self._away = [(storage, self._copy_of(storage)) for storage in storages(self._tensors())]
        for storage, copy in self._away:
            copy.copy_(as_bytes(storage), non_blocking=True)
        torch.cuda.synchronize()
        for storage, _ in self._away:
            storage.resize_(0)
        torch.cuda.empty_cache()
        log.info("%.2f GiB of GPU memory are released", (free_bytes() - before) / 2**30)

    def resume(self) -> None:
        wait_for_memory(sum(copy.numel() for _, copy in self._away))
        for storage, copy in self._away:
            storage.resize_(copy.numel())
            as_bytes(storage).copy_(copy, non_blocking=True)
        torch.cuda.synchronize()
        self._away = []

    def _copy_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._copies or self._copies[key].numel() != size:
            self._copies[key] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._copies[key]


class SaverRegion:
    """Memory of torch-memory-saver: what is allocated in the region keeps its addresses while its pages are away."""

    TAG = "psrl"

    def __init__(self) -> None:
        self._saver = _torch_memory_saver()
        self._released = 0

    def region(self) -> AbstractContextManager[None]:
        return self._saver.region(tag=self.TAG, enable_cpu_backup=True)

    def pause(self) -> None:
        torch.cuda.synchronize()
        before = free_bytes()
        self._saver.pause(self.TAG)
        self._released = free_bytes() - before
        torch.cuda.empty_cache()
        log.info("%.2f GiB of GPU memory are released", (free_bytes() - before) / 2**30)

    def resume(self) -> None:
        wait_for_memory(self._released)
        self._saver.resume(self.TAG)


@functools.cache
def _torch_memory_saver() -> Any:
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"  # no preloaded library; only regions are touched. It can be set once
    torch_memory_saver.retain_cpu_backup = True  # else each pause pins host memory anew
    return torch_memory_saver


def trainer_memory(
    saver_range: str | None, device: torch.device, tensors: Callable[[], Iterable[torch.Tensor]]
) -> Memory:
    """How a trainer rank on `device` releases `tensors()`, everything that it keeps there between two steps."""
    if device.type != "cuda":
        return NoMemory()
    return HostCopies(tensors) if saver_range is None else SaverRegion()


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The GPU storages behind `tensors`, each once, empty ones left out."""
    found = {
        storage._cdata: storage
        for tensor in tensors
        if tensor.is_cuda and (storage := tensor.untyped_storage()).nbytes()
    }
    return list(found.values())


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [nbytes], a view of all of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def wait_for_memory(nbytes: int, limit_s: float = FREE_WAIT_S, sleep: Callable[[float], None] = time.sleep) -> None:
    """Return once the GPU has `nbytes` free. TurnError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (free := free_bytes()) < nbytes + HEADROOM_BYTES:
        torch.cuda.empty_cache()
        if time.monotonic() >= deadline:
            raise TurnError(
                f"{nbytes / 2**30:.2f} GiB are needed for this turn but {free / 2**30:.2f} GiB of the GPU are free after {limit_s:g} s: the other "
                "side kept the rest; lower gen_actor_rollout_ref.rollout.gpu_memory_utilization if an engine does"
            )
        sleep(0.05)
