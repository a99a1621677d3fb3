"""The TrainBackend protocol: what the training step needs from FSDP2, Megatron or whatever holds the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from psrl.algorithms.sequences import Sequences


@dataclass(frozen=True, slots=True)
class WeightShard:
    """One rank's part of one tensor: rows [row_start, row_start + local.shape[0]) of `full_shape` (dim 0)."""

    name: str
    full_shape: tuple[int, ...]
    row_start: int
    local: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """All int64 [rows, length]. `positions`: of each token in its own sequence. `segments`: 0 for the prompt, 1, 2, ...
    for the responses, -1 for padding; a token attends to earlier tokens of the prompt and of its own segment.
    `predictors`: the column whose output predicts this token (the one before it, or the prompt's last)."""

    positions: torch.Tensor
    segments: torch.Tensor
    predictors: torch.Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded rows of one rank. All of shape [rows, length]; `input_ids` int64, the masks bool, the rest float32.

    `loss_mask` marks response tokens that may be trained. Column t of `old_log_probs`, `rollout_log_probs`,
    `advantages` and `loss_mask` belongs to the token `input_ids[:, t]`, predicted from the tokens before it (column 0
    is never a target: its mask is 0). A dummy micro-batch (another rank has one more) has an all-zero mask.

    Where rows hold several responses behind one prompt (`trainer.rows`), `layout` says how the tokens belong together;
    `sequences` says in any case which sample of the batch each response token belongs to.

    The rest is filled in stage after stage, None until then: `old_log_probs` of the training weights at the buffer's start,
    `ref_log_probs` of the initial policy, `kl_penalty` (what the reward of each token loses), `values` and `returns` of the
    critic, `advantages` (0 until then), `accepted` (bool: what rejection sampling keeps) and `is_weights` (importance
    weights that were normalised over the buffer).
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    advantages: torch.Tensor
    rollout_log_probs: torch.Tensor
    sequences: Sequences
    old_log_probs: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    kl_penalty: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    accepted: torch.Tensor | None = None
    is_weights: torch.Tensor | None = None
    layout: SharedLayout | None = None

    @property
    def trained(self) -> torch.Tensor:
        """bool [rows, length]: tokens whose loss counts, `loss_mask` less what was rejected."""
        return self.loss_mask if self.accepted is None else self.loss_mask & self.accepted


LossFn = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""`loss_fn(log_probs, batch)`, or `loss_fn(log_probs, batch, entropy)` if its attribute `needs_entropy` is true; all grids are
[rows, length]. Returns (a scalar already divided by the *global* denominator, partial metrics as in `algorithms.metrics`). If its
attribute `empty` is true no token of the whole optimizer step is trained, on no rank."""


class PendingSave(Protocol):
    """A checkpoint that is being written."""

    def done(self) -> bool:
        """Every rank has written its part, or it has failed. Does not block."""
        ...

    def wait(self) -> float:
        """Block until it is done; returns when (time.monotonic) it was. RuntimeError on every rank when one failed."""
        ...


class TrainBackend(Protocol):
    rank: int
    world_size: int
    device: torch.device
    """Where it computes, and where the tensors of its micro-batches belong."""
    dp_rank: int
    """Which share of the micro-batches this rank has; ranks that share a model or a row have the same."""
    dp_size: int
    hidden_size: int
    pads: bool
    """Its model computes padding too; if not, the real tokens of a micro-batch only."""
    can_share_prompts: bool
    """Rows may hold several responses behind one prompt (`MicroBatch.layout`)."""

    def log_probs(self, batch: MicroBatch) -> torch.Tensor:
        """log p(token t | tokens before t) at the sampling temperature, no gradient, float32 [rows, length], 0 where
        `loss_mask` is not set."""
        ...

    def log_probs_of(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """`log_probs` of each: pipeline stages work on several at the same time."""
        ...

    def update(self, batches: Sequence[MicroBatch], loss_fn: LossFn) -> dict[str, float]:
        """One optimizer step: gradients of all micro-batches accumulated, clipped, applied. Returns the partial metrics of
        `loss_fn` combined over micro-batches and ranks, and `actor/grad_norm`, `actor/lr`, `actor/skipped_steps`. That is 1
        where nothing changed, not even by momentum or weight decay: with no micro-batch, with a loss that is `empty`, or with
        a gradient that is not finite."""
        ...

    def accumulate(self, batches: Sequence[MicroBatch], loss_fn: LossFn) -> None:
        """The first half of `update`: add the gradients of these micro-batches to those that wait."""
        ...

    def apply_gradients(self, divisor: float = 1.0) -> dict[str, float]:
        """The second half: divide what waits by `divisor`, clip it and take one optimizer step; returns as `update`. A
        `divisor` of 0 says that nothing in it was trained."""
        ...

    def remember(self) -> None:
        """Keep the weights and the optimizer's state as they are now, in place of what was kept before (a second copy of
        both in memory)."""
        ...

    def as_remembered(self) -> AbstractContextManager[None]:
        """Forward passes inside see the remembered weights, if there are any. Nothing inside may change them. Collective."""
        ...

    def go_back(self) -> None:
        """Drop gradients that wait; where optimizer steps were taken since `remember`, take them back."""
        ...

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Each value added over all data-parallel ranks, for example a rank's trainable tokens."""
        ...

    def weight_shards(self) -> Iterator[WeightShard]:
        """This rank's shards under Hugging Face names, tied tensors once; every rank has the same names in the same
        order."""
        ...

    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint, all ranks together."""
        ...

    def save(self, directory: Path) -> None: ...

    def save_async(self, directory: Path) -> PendingSave:
        """`save`, of the state at this moment, while training goes on."""
        ...

    def load(self, directory: Path) -> None: ...


class ValueBackend(TrainBackend, Protocol):
    """The critic: a model that is trained as the policy is but gives one number a token."""

    def values(self, batch: MicroBatch) -> torch.Tensor:
        """The return that is expected where token t is about to be written, no gradient, float32 [rows, length], 0 where
        `loss_mask` is not set. Its `update` calls `loss_fn(values, batch)` with such a grid, with gradient, and returns
        `critic/grad_norm` and `critic/lr`."""
        ...
