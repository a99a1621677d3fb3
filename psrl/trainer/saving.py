"""Checkpoints of one trainer rank: begun after a step, written while training goes on, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.trainer import checkpoints
from psrl.trainer.backends.base import PendingSave, TrainBackend

CRITIC = "critic"
"""Directory inside a checkpoint that holds the critic."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Every rank has written its part of the checkpoint of `version`; it is not marked complete yet."""

    version: int
    seconds: float
    """From its beginning until the last rank had written."""
    extra: dict[str, Any]
    """What `begin` was given to go into the checkpoint's metadata."""


class Saver:
    """`barrier` makes all ranks wait for each other. `version`: of the last save that was begun, at first the one that the
    run resumed from. `critic`: what is saved beside the actor. A save that failed raises RuntimeError, on every rank, where
    it is noticed."""

    def __init__(
        self,
        actor: TrainBackend,
        root: Path,
        version: int,
        barrier: Callable[[], None],
        *,
        background: bool,
        critic: TrainBackend | None = None,
    ) -> None:
        self.version = version
        self._actor, self._root, self._barrier, self._background = actor, root, barrier, background
        self._critic = critic
        self._pending: list[PendingSave] = []
        self._begun_s = 0.0
        self._extra: dict[str, Any] = {}

    def begin(self, version: int, extra: dict[str, Any] | None = None) -> None:
        """Begin to save `version` (collective). The save before must have been taken by `finished` or `wait`."""
        if self._pending:
            raise RuntimeError(
                f"the checkpoint of {version} cannot begin: that of {self.version} is still being written"
            )
        self._begun_s = time.monotonic()
        if self._actor.rank == 0:
            checkpoints.begin(self._root, version, sum(model.checkpoint_bytes() for model in self._models()))
        self._barrier()
        self.version, self._extra = version, extra or {}
        path = checkpoints.step_directory(self._root, version)
        self._pending = [model.save_async(path / name) for model, name in self._models().items()]
        if not self._background:
            for pending in self._pending:
                pending.wait()

    def finished(self) -> Saved | None:
        """The save that has ended since the last call, None if there is none. Does not block."""
        return self.wait() if self._pending and all(pending.done() for pending in self._pending) else None

    def wait(self) -> Saved | None:
        """Block until the save that was begun is written; None if there is none."""
        if not self._pending:
            return None
        all_pending, self._pending = self._pending, []
        ended_s = max(pending.wait() for pending in all_pending)
        return Saved(self.version, ended_s - self._begun_s, self._extra)

    def _models(self) -> dict[TrainBackend, str]:
        """What is saved, and where inside the checkpoint."""
        return {self._actor: ""} if self._critic is None else {self._actor: "", self._critic: CRITIC}


def load_checkpoint(path: Path, actor: TrainBackend, critic: TrainBackend | None) -> None:
    """Restore what a Saver wrote. Collective."""
    actor.load(path)
    if critic is not None:
        critic.load(path / CRITIC)
