"""The Engine protocol: what a rollout instance needs from whatever decodes tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import zmq

from psrl.protocol.generation import CacheEvents, EngineStats, GenerateRequest, TokenChunk


@dataclass(frozen=True, slots=True)
class InWorkers:
    """Given to `update_weights` in place of tensors: this version has been pulled by the engine's own workers."""

    version: int


class Engine(Protocol):
    """Continuous batching behind a few calls. Not thread-safe: the instance's one loop owns it.

    An engine decodes either within `step`, in this process, or all the time in a process of its own. It is a
    `psrl.net.waiting.Waitable`: the loop waits for it as for a socket, then calls `step`, even if it has no work.

    `submit` never blocks and never raises for a bad request: a prompt that leaves no room in the context comes back
    from the next `step` as a chunk with finish "length" and no tokens (the engine lives on).
    Every token that `step` returns carries the version that sampled it (spans), and its log-prob.
    """

    version: int
    """Version of the weights in use, -1 before the first `update_weights`."""
    on_gpu: bool
    """Its weights are in the memory of GPUs, each of a process that `call_workers` reaches."""

    def submit(self, request: GenerateRequest) -> None: ...

    def step(self) -> list[TokenChunk]:
        """The new tokens of each sample: of one decode step made here and now, or of all that were made elsewhere since
        the last call. Raises if the engine cannot go on, which is the end of the process that owns it."""
        ...

    def waitables(self) -> Sequence[zmq.Socket[bytes] | int]:
        """Sockets and descriptors that are readable once `step` has something to say; none if it decodes in this process."""
        ...

    def due_in_s(self) -> float:
        """0 if `step` should be called now, otherwise infinite."""
        ...

    def abort(self, groups: Iterable[int] | None = None) -> list[TokenChunk]:
        """End these groups' samples (all if None): the tokens not yet returned of each, and finish "abort", or the finish
        of one that had ended by itself."""
        ...

    def abort_samples(self, samples: Collection[tuple[int, int]]) -> list[TokenChunk]:
        """End these (group, sample) alone, like `abort`."""
        ...

    def abort_waiting(self) -> list[TokenChunk]:
        """End those samples that do not run now, preempted or not yet begun, like `abort`."""
        ...

    def has_work(self) -> bool: ...

    def weight_specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of each tensor that `update_weights` must be given; tied tensors appear once."""
        ...

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights between two decode steps. Running samples go on under the new version with recomputed KV;
        the caller aborts them first if they shall be re-routed. Raises ValueError on a missing or unknown name, a wrong
        shape or dtype, and then keeps the old version and the old weights."""
        ...

    def sleep(self) -> None:
        """Release the memory of weights and KV cache: `version` becomes -1. The caller aborts all samples first; requests that
        come before the next `update_weights` are refused."""
        ...

    def wake(self) -> None:
        """Take the memory again. `update_weights` must follow before anything is decoded."""
        ...

    def cache_events(self) -> CacheEvents | None:
        """What entered and left the prefix cache since the last call; None: nothing, or the engine was made without a
        `block_size`. A request whose first whole blocks (its last token apart) are held does not compute their tokens."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
