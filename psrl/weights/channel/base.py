"""The weight channel: trainer ranks publish versions, instances pull them, whatever carries the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from psrl.trainer.backends.base import WeightShard
from psrl.weights.copies import Copies, views
from psrl.weights.plan import PullPlan


class PullError(Exception):
    """A pull failed and staged nothing. Not `retryable`: it can never succeed (names, shapes or dtypes differ)."""

    def __init__(self, cause: str, retryable: bool = True) -> None:
        super().__init__(cause)
        self.cause = cause
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class Publication:
    """What one `publish` did: bytes packed, seconds packing and waiting for readers, readers that lost their slot."""

    nbytes: int
    pack_s: float
    wait_s: float = 0.0
    revoked: tuple[str, ...] = ()


@dataclass(slots=True)
class StagedWeights:
    """A whole, checked version in this process' memory, to be switched to between two decode steps.

    It lies as it arrived, in the puller's buffer, and is valid until its next pull or its close.
    """

    version: int
    incarnation: int
    plan: PullPlan
    buffer: torch.Tensor
    transport: str
    transfer_s: float = 0.0
    """Seconds in which bytes were moved, a part of `pull_s`."""
    pull_s: float = 0.0
    valid: bool = field(default=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.plan.tensors)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of each tensor of the engine, in its shape and dtype: a view where it has arrived in one piece, else
        put together now. RuntimeError if stale."""
        for planned in self.plan.tensors:
            self._check_valid()
            if (start := planned.whole_at) is not None:
                flat = self.buffer[start : start + planned.nbytes]
                yield planned.name, flat.view(planned.dtype).view(planned.shape)
                continue
            made = torch.zeros(planned.shape, dtype=planned.dtype, device=self.buffer.device)
            for target, source in views(planned, self.buffer, made):
                target.copy_(source)
            yield planned.name, made

    def copies(self, tensors: Mapping[str, torch.Tensor], earlier: Copies | None = None) -> Copies:
        """The copies that put this version into the engine's own tensors; `earlier` ones to the same tensors are used again if
        they fit. RuntimeError if stale."""
        self._check_valid()
        if earlier is not None and earlier.plan is self.plan and earlier.buffer is self.buffer:
            return earlier
        return Copies(self.plan, self.buffer, tensors)

    def _check_valid(self) -> None:
        if not self.valid:
            raise RuntimeError(f"staged weights {self.version} are gone: another pull has begun since")


class WeightPublisher(Protocol):
    """One trainer rank's side."""

    transport: str
    """What carries the bytes, for the log: "nixl, filesystem"."""

    def serve(self) -> None:
        """Become reachable. Once, before the first `publish`."""
        ...

    def publish(self, version: int, incarnation: int, shards: Iterable[WeightShard]) -> Publication:
        """Make this rank's part of (incarnation, version) readable; on return it is whole. The version before stays
        readable, older ones go. ValueError if the version is not newer, or the tensors are not those of the first call.
        """
        ...

    def close(self) -> None: ...


class Staged(Protocol):
    """A whole, checked version, here or in an engine's workers."""

    version: int
    incarnation: int
    transport: str
    pull_s: float

    @property
    def nbytes(self) -> int: ...

    def tensors(self) -> Any:
        """What `Engine.update_weights` takes."""
        ...


class WeightPuller(Protocol):
    """An instance's side. One pull at a time; not thread-safe (BackgroundPull gives it a thread of its own)."""

    transport: str
    on_progress: Callable[[int], None] | None
    """Called with the bytes that have arrived so far, from the pulling thread."""

    def pull(self, version: int, incarnation: int, deadline_s: float) -> Staged:
        """Fetch this version from all ranks into staging, verify it, return it. Blocks until `deadline_s`
        (time.monotonic) at most; PullError if it cannot be had whole, and then nothing is staged. Weights that were
        staged by an earlier pull become invalid at the start."""
        ...

    def cancel(self) -> None:
        """From any thread: the pull that is going on, and any later one, fails soon."""
        ...

    def close(self) -> None: ...
