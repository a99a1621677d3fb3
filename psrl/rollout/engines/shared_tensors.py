"""A set of tensors in memory that two processes of this host share, without a name that could be left behind.

The owner fills it, others map it by the owner's descriptor (`/proc/<pid>/fd/<n>`): when the last of them has ended it is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod

import torch

from psrl.host_memory import map_file, memory_file, reserve_pages

ALIGNMENT = 64

Layout = list[tuple[str, str, list[int], int]]
"""(name, dtype, shape, offset in bytes) of each tensor; plain values, so that it can be sent anywhere."""


class SharedTensors:
    """Room for the tensors of `specs` (name -> shape, dtype). Private to this user: a descriptor of this process."""

    def __init__(self, name: str, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.layout: Layout = []
        end = 0
        for tensor, (shape, dtype) in specs.items():
            self.layout.append((tensor, str(dtype).removeprefix("torch."), list(shape), end))
            end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._size, self._reserved = max(end, 1), False
        self._descriptor = memory_file(name, self._size, reserve=False)
        self._tensors = dict(map_tensors(self.path, self.layout)[1])

    @property
    def path(self) -> str:
        """Where another process of this user finds it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy these in; their names, shapes and dtypes must be those of the specs. The first time takes the memory: where
        nothing ever comes this way it costs none. OSError if there is no room."""
        if not self._reserved:
            reserve_pages(self._descriptor, self._size)
            self._reserved = True
        for name, tensor in tensors:
            self._tensors[name].copy_(tensor)

    def close(self) -> None:
        self._tensors.clear()
        os.close(self._descriptor)


def map_tensors(path: str, layout: Layout) -> tuple[torch.Tensor, Iterator[tuple[str, torch.Tensor]]]:
    """(the whole mapping as bytes, views of its tensors); they keep the mapping alive."""
    with open(path, "r+b", buffering=0) as file:  # noqa: PTH123 (not a path of the filesystem)
        memory = map_file(file.fileno(), os.fstat(file.fileno()).st_size)

    def view(dtype_name: str, shape: list[int], offset: int) -> torch.Tensor:
        dtype = getattr(torch, dtype_name)
        return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    return memory, ((name, view(dtype, shape, offset)) for name, dtype, shape, offset in layout)
