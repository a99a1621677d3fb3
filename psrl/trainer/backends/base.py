"""The TrainBackend protocol: what the training step needs from FSDP2, Megatron or whatever holds the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class WeightShard:
    """One rank's part of one tensor: rows [row_start, row_start + local.shape[0]) of `full_shape` (dim 0)."""

    name: str
    full_shape: tuple[int, ...]
    row_start: int
    local: torch.Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded rows of one rank. All of shape [rows, length]; `loss_mask` marks response tokens that may be trained.

    Column t of `old_log_probs`, `rollout_log_probs`, `advantages` and `loss_mask` belongs to the token
    `input_ids[:, t]`, predicted from the tokens before it (column 0 is never a target: its mask is 0).
    A dummy micro-batch (another rank has one more) has an all-zero mask.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    advantages: torch.Tensor
    rollout_log_probs: torch.Tensor
    old_log_probs: torch.Tensor | None = None


class TrainBackend(Protocol):
    rank: int
    world_size: int

    def log_probs(self, batch: MicroBatch) -> torch.Tensor:
        """log p(token t | tokens before t) at the sampling temperature, no gradient, float32 [rows, length]."""
        ...

    def update(self, batches: list[MicroBatch], loss_fn) -> dict[str, float]:
        """One optimizer step: gradients of all micro-batches accumulated, clipped, applied. `loss_fn(log_probs, batch)`
        returns (a scalar already divided by the *global* token count, a dict of metric sums). Returns the summed metrics,
        grad_norm and lr."""
        ...

    def weight_shards(self) -> Iterator[WeightShard]:
        """This rank's shards under Hugging Face names, tied tensors once, every rank the same names in the same order."""
        ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...
