"""What a checkpoint directory holds, without a backend: names, shapes and dtypes of its weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_NO_GROUP = "torch.distributed is disabled"
WEIGHT = "model."
"""Prefix of weights in a checkpoint, before their Hugging Face name."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint; `key` is its name there."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_weights(checkpoint: Path) -> dict[str, Stored]:
    """The weights by their Hugging Face names, sorted."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        key.removeprefix(WEIGHT): Stored(key, tuple(entry.size), entry.properties.dtype)
        for key, entry in sorted(entries.items())
        if key.startswith(WEIGHT) and isinstance(entry, TensorStorageMetadata)
    }


@contextmanager
def quiet_single_process() -> Iterator[None]:
    """Without the warning that a single process has no process group."""
    with warnings.catch_warnings():
        ignore_missing_group()
        yield


def ignore_missing_group() -> None:
    """The same for good, also in other threads."""
    warnings.filterwarnings("ignore", message=_NO_GROUP, category=UserWarning)
