"""The Engine protocol: what a rollout instance needs from whatever decodes tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from psrl.protocol.generation import EngineStats, GenerateRequest, TokenChunk


class Engine(Protocol):
    """Continuous batching behind six calls. Not thread-safe: the instance's one loop owns it.

    `submit` never blocks and never raises for a bad request: a prompt that leaves no room in the context comes back
    from the next `step` as a chunk with finish "length" and no tokens (the engine lives on).
    Every token that `step` returns carries the version that sampled it (spans), and its log-prob.
    """

    version: int
    """Version of the weights in use, -1 before the first `update_weights`."""

    def submit(self, request: GenerateRequest) -> None: ...

    def step(self) -> list[TokenChunk]:
        """Admit waiting requests, decode one token for each running sample. Returns the new tokens of each."""
        ...

    def abort(self, groups: Iterable[int] | None = None) -> list[TokenChunk]:
        """End these groups' samples (all if None) with finish "abort". Tokens already returned are not repeated."""
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

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
