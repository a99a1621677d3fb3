"""Flat buffers that transfers run on."""

from __future__ import annotations

import contextlib
import mmap

import torch


def flat_buffer(nbytes: int) -> torch.Tensor:
    """A zeroed uint8 CPU tensor on huge pages where the system grants them, page-aligned.

    A read out of another process looks up every page that it touches: 2 MiB pages made it 2-3 times as fast as 4 KiB
    ones (14 instead of 5 GB/s, a plain copy doing 17).
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
