"""Ulysses sequence parallelism: each rank has a part of every row, and inside attention all of it for a part of the heads.

Jacobs et al. 2023 (arXiv:2309.14509). An all-to-all before attention turns [rows, heads, part, d] into [rows, heads / n,
length, d], and another one turns the result back, so activations shrink by the number of ranks n and attention stays exact.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import PreTrainedModel

from psrl.trainer.backends.base import MicroBatch, SharedLayout
from psrl.trainer.backends.core import shared_mask
from psrl.trainer.backends.layer_attention import register_attention

SIZE_KEY = "train_actor_rollout_ref.actor.ulysses_sequence_parallel_size"

_numbers = itertools.count()


class SharedRows:
    """The ranks of `group` share every row. `attention` stands where the model's own would be, over all of a row."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def enter(self, batch: MicroBatch) -> MicroBatch:
        """The batch with rows of a length that the ranks can share: padded on the right, where nothing looks. Attention gets its
        mask; the model gets this rank's columns only (`part`)."""
        missing = -batch.input_ids.shape[1] % self.size
        if not missing:
            return batch
        layout = batch.layout and SharedLayout(
            F.pad(batch.layout.positions, (0, missing)),
            F.pad(batch.layout.segments, (0, missing), value=-1),
            F.pad(batch.layout.predictors, (0, missing)),
        )
        return dataclasses.replace(
            batch,
            input_ids=F.pad(batch.input_ids, (0, missing)),
            loss_mask=F.pad(batch.loss_mask, (0, missing)),
            layout=layout,
        )

    def part(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's columns of a batch that has entered: (tokens, their positions), each [rows, part]."""
        rows, length = batch.input_ids.shape
        positions = torch.arange(length, device=batch.input_ids.device).expand(rows, length)
        if batch.layout is not None:
            positions = batch.layout.positions
        return self._columns(batch.input_ids), self._columns(positions)

    def mine(self, places: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the flat `places` [n] of rows of `length` lie in this rank's columns (bool [n]), and where there."""
        part = length // self.size
        column = places % length - self.rank * part
        inside = (column >= 0) & (column < part)
        return inside, (places // length * part + column)[inside]

    def leave(self, grid: torch.Tensor, length: int) -> torch.Tensor:
        """Every rank's part of a grid [rows, padded length] (0 elsewhere) put together, cut to `length`. Each rank gets all
        of it and computes the same loss, so the gradient of its own part is the gradient."""
        whole: torch.Tensor = _Sum.apply(grid, self.group)  # type: ignore[no-untyped-call]
        return whole[:, :length]

    def _columns(self, grid: torch.Tensor) -> torch.Tensor:
        return grid.chunk(self.size, dim=1)[self.rank]

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """[rows, heads, part, d] each, key and value with fewer heads -> [rows, part, heads, d]. `mask`: of whole rows."""
        if key.shape[1] % self.size:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        q, k, v = (self._exchange(x, 1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self._exchange(out, 2, 1).transpose(1, 2)

    def _exchange(self, x: torch.Tensor, scattered: int, gathered: int) -> torch.Tensor:
        result: torch.Tensor = _Exchange.apply(x, scattered, gathered, self.group)  # type: ignore[no-untyped-call]
        return result


class Ulysses(SharedRows):
    """... of a Hugging Face model whose attention is full and goes through PyTorch's kernel."""

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        heads = model.config.num_attention_heads
        if heads % self.size:
            raise ValueError(f"{SIZE_KEY}={self.size} does not divide the model's attention heads ({heads})")
        self._mask: torch.Tensor | None = None
        name = f"psrl_ulysses_{next(_numbers)}"
        register_attention(name, self._of_layer)
        model.config._attn_implementation = name

    def inputs(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """What the model is called with. The mask stays here: it is one of whole rows."""
        self._mask = shared_mask(batch.layout)
        ids, positions = self.part(batch)
        return {"input_ids": ids, "position_ids": positions}

    def _of_layer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, **_: Any
    ) -> torch.Tensor:
        return self.attention(query, key, value, self._mask, scale)


class _Exchange(torch.autograd.Function):
    """Give each rank its part of dimension `scattered`, and get all of dimension `gathered`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scattered: int, gathered: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dims, ctx.group = (scattered, gathered), group
        return _all_to_all(x, scattered, gathered, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        scattered, gathered = ctx.dims
        return _all_to_all(grad_outputs[0], gathered, scattered, ctx.group), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_outputs[0], None


def _all_to_all(x: torch.Tensor, scattered: int, gathered: int, group: dist.ProcessGroup) -> torch.Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim=scattered))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), dim=gathered)
