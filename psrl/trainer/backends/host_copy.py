"""A rank's own part of tensors, and a copy of it in host memory that a checkpoint is written from."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from psrl.host_memory import register_host, unregister_host

PINNED_FROM_BYTES = 2**20
"""Smaller tensors share pages with others, which CUDA locks only once."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, the live one."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class StateCopy:
    """Host memory for copies of one state, made at the first and kept: pages are touched, and locked where the state is on a GPU,
    once and not at each checkpoint. A copy holds until the next one is made."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._pinned: list[torch.Tensor] = []
        weakref.finalize(self, _unpin, self._pinned)

    def of(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`state` as it is now, in host memory, of this rank's shards only."""
        if _layout(self._tensors) != _layout(state):
            _unpin(self._pinned)
            self._tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
            if any(local_part(tensor).is_cuda for tensor in state.values()):
                self._pinned += _pin(self._tensors.values())
            return self._tensors
        for name, tensor in state.items():
            local_part(self._tensors[name]).copy_(local_part(tensor), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._tensors


def _layout(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (local_part(tensor).shape, tensor.dtype) for name, tensor in state.items()}


def _pin(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    found = [part for part in map(local_part, tensors) if part.nbytes >= PINNED_FROM_BYTES]
    for part in found:
        register_host(part)
    return found


def _unpin(tensors: list[torch.Tensor]) -> None:
    """Before they are given back: CUDA would fail where it meets their addresses again."""
    while tensors:
        unregister_host(tensors.pop())
