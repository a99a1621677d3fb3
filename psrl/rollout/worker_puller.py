"""Weights that an engine's workers pull themselves, into the memory of the GPU that they decode on.

The instance only says which version and hears of the end: a `WeightPuller` like any other, whose `StagedInWorkers` stand for what
lies in the workers. The receiver in each worker is a class by name ("module:Class"), so that neither side knows the other:

    Receiver(tensors, fused=, rank=, elsewhere=, device=, **settings)   # see PsrlWorker.psrl_attach
    .start(version, incarnation, timeout_s)                 # returns at once
    .poll()      # None, or a msgspec.Struct with `cause` and `retryable`, or one with `nbytes` and `transport`
    .switch()    # fused: new weights into the engine's tensors
    .staged_tensors(), .switched()                          # not fused: for the engine's own loader
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from psrl.rollout.engines.base import InWorkers
from psrl.weights.channel.base import PullError

ATTACH_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
"""A worker answers between two decode steps."""
POLL_S = 0.01


@runtime_checkable
class Workers(Protocol):
    """An engine with workers: VllmEngine."""

    def call_workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]: ...


@dataclass(slots=True)
class StagedInWorkers:
    """In place of `StagedWeights`: a whole version in each worker. `nbytes` of all of them."""

    version: int
    incarnation: int
    nbytes: int
    transport: str
    pull_s: float = 0.0

    def tensors(self) -> InWorkers:
        return InWorkers(self.version)


class WorkerPuller:
    """See WeightPuller. Used by one thread at a time; `cancel` from any."""

    def __init__(self, engine: Workers, receiver: str, settings: Mapping[str, Any]) -> None:
        self._engine = engine
        self._cancelled = threading.Event()
        self.transport = receiver
        self.on_progress: Callable[[int], None] | None = None
        engine.call_workers("psrl_attach", receiver, dict(settings), timeout_s=ATTACH_TIMEOUT_S)

    def pull(self, version: int, incarnation: int, deadline_s: float) -> StagedInWorkers:
        """PullError if one of the workers fails; what the others have then is never switched to."""
        left_s = max(0.0, deadline_s - time.monotonic())
        ranks = len(self._engine.call_workers("psrl_pull", version, incarnation, left_s, timeout_s=ANSWER_TIMEOUT_S))
        ends: list[dict[str, Any] | None] = [None] * ranks
        while None in ends:
            if self._cancelled.wait(POLL_S):
                raise PullError("the pull was cancelled")
            if time.monotonic() >= deadline_s + ANSWER_TIMEOUT_S:  # their own deadline is the earlier one
                raise PullError(f"deadline passed: {ends.count(None)} of {ranks} workers still pull version {version}")
            news = self._engine.call_workers("psrl_pulled", timeout_s=ANSWER_TIMEOUT_S)
            ends = [end if end is not None else new for end, new in zip(ends, news, strict=True)]
        done = [end for end in ends if end is not None]
        failed = [end for end in done if "cause" in end]
        if failed:
            raise PullError(failed[0]["cause"], retryable=all(end["retryable"] for end in failed))
        self.transport = done[0]["transport"]
        return StagedInWorkers(version, incarnation, sum(end["nbytes"] for end in done), self.transport)

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        """The receivers end with their workers."""
