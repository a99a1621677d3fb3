"""Host memory that processes of one user share: made without a name, mapped, and known to CUDA where a GPU copies it."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os

import torch

log = logging.getLogger(__name__)


def memory_file(name: str, nbytes: int, *, reserve: bool = True) -> int:
    """A descriptor of `nbytes` zeroed bytes. They are in no directory: who may open `/proc/<pid>/fd/<n>` of this process maps
    them, and however it ends, they go with the last mapping. `reserve`: see `reserve_pages`. OSError if there is no room."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        if reserve:
            reserve_pages(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def reserve_pages(fd: int, nbytes: int) -> None:
    """Take the pages now, with an OSError if there is no room: later it would be a SIGBUS in the midst of a copy."""
    os.posix_fallocate(fd, 0, nbytes)


def map_file(fd: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over the first `nbytes` bytes of an open file, shared with all who map it. No core file has a copy of it."""
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    memory.madvise(mmap.MADV_DONTDUMP)
    ask_for_huge_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)


def register_host(buffer: torch.Tensor) -> None:
    """Lock host memory and tell CUDA of it: copies then run at the speed of the bus (55 GB/s instead of 7). It must be
    unregistered before it is unmapped, or CUDA fails later where it meets the same addresses again."""
    code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code != 0:
        log.warning("%d bytes of host memory cannot be registered with CUDA (error %d): slower", buffer.nbytes, code)


def unregister_host(buffer: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
