"""Writing checkpoints: what can go wrong, as ordinary errors, and a save that goes on in the background."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from psrl.trainer.stored import ignore_missing_group, quiet_single_process

WRITE_DEADLINE_S = 1800.0
"""A file system that has not taken a checkpoint after so long is taken for dead."""


class BackgroundSave:
    """See PendingSave. The future ends on a rank only when all ranks have written."""

    def __init__(
        self, state: dict[str, Any], directory: Path, group: dist.ProcessGroup | None, *, no_dist: bool
    ) -> None:
        """Begin to write `state`, which nobody changes any more. The ranks meet in `group`."""
        ignore_missing_group()
        future = dcp.async_save(
            state, checkpoint_id=directory, process_group=group, no_dist=no_dist, async_stager=_AlreadyCopied()
        )
        assert isinstance(future, Future)
        self._future, self._directory = future, directory
        self._ended_s = math.inf
        future.add_done_callback(self._note_end)

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> float:
        with checkpoint_errors(f"cannot write the checkpoint {self._directory}"):
            try:
                self._future.result(WRITE_DEADLINE_S)
            except TimeoutError as error:
                raise RuntimeError(
                    f"the checkpoint {self._directory} is not written after {WRITE_DEADLINE_S:g} s of waiting: look at the "
                    "file system of run_dir, then start the run again, which goes on from the checkpoint before"
                ) from error
        return min(self._ended_s, time.monotonic())  # a waiter may wake before the note is made

    def _note_end(self, _future: Future[Any]) -> None:
        self._ended_s = time.monotonic()


class _AlreadyCopied:
    """The stager that `async_save` asks for its copy."""

    _synchronize_after_execute = should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def checkpoint_errors(what: str) -> Iterator[None]:
    """CheckpointException is no Exception."""
    try:
        with quiet_single_process():
            yield
    except CheckpointException as error:
        raise RuntimeError(f"{what}: {error}") from error
