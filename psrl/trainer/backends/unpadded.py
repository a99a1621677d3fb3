"""Rows without their padding: a micro-batch is one row of all its real tokens, and attention stays within each sequence.

The model sees [1, tokens] with positions that begin again at 0 for each sequence; where sequences end travels through the model
to its attention, which is one of two functions here: a kernel for sequences of any lengths on a GPU, PyTorch's usual one for each
sequence in turn elsewhere.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import PretrainedConfig

from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.backends.layer_attention import register_attention

logger = logging.getLogger(__name__)

KEY = "train_actor_rollout_ref.actor.use_remove_padding"
IN_ONE_KERNEL, ONE_BY_ONE = "psrl_unpadded_kernel", "psrl_unpadded_one_by_one"
KERNEL_DTYPES, LARGEST_HEAD = (torch.bfloat16, torch.float16), 256

_FEWER_KEY_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""torch 2.11 takes fewer key-value heads than query heads without being told."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Sequences that stand one after the other. `cumulated`: int32 [sequences + 1], 0 and then where each one ends; none has more
    than `longest` tokens."""

    cumulated: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Unpadded:
    """The real tokens of a micro-batch and their positions, int64 [1, tokens] each, and where sequences end. `places` [rows x length]:
    where in the row each real token of the micro-batch is."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    ends: Ends
    places: torch.Tensor


def without_padding(batch: MicroBatch) -> Unpadded:
    """Rows [[a, b, c], [d, e, -]] become a b c d e with positions 0 1 2 0 1, which begin at 0 and 3 and end at 5. The longest
    sequence is as long as the rows are wide, so nothing waits for the device to say how long it is."""
    assert batch.layout is None, "rows that share prompts are not one sequence each"
    real, width = batch.attention_mask.flatten(), batch.attention_mask.shape[1]
    kept = real.nonzero().squeeze(-1)
    ends = batch.attention_mask.sum(dim=1).cumsum(0)
    return Unpadded(
        input_ids=batch.input_ids.flatten()[kept][None],
        positions=(kept % width)[None],
        ends=Ends(F.pad(ends, (1, 0)).to(torch.int32), width),
        places=real.cumsum(0) - 1,
    )


def in_one_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: Ends, scale: float | None
) -> torch.Tensor:
    """[1, heads, tokens, d] each, key and value with fewer heads -> [1, tokens, heads, d]."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    where, longest = ends.cumulated, ends.longest
    out = varlen_attn(q, k, v, where, where, longest, longest, scale=scale, window_size=(-1, 0), **_FEWER_KEY_HEADS)
    assert isinstance(out, torch.Tensor)  # a pair only where more is asked for
    return out[None]


@torch.compiler.disable  # as many operations as there are sequences
def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: Ends, scale: float | None
) -> torch.Tensor:
    """As `in_one_kernel`, in any dtype and on any device."""
    lengths = ends.cumulated.diff().tolist()
    fewer = query.shape[1] != key.shape[1]
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=fewer)
        for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Ends, float | None], torch.Tensor]
ATTENTIONS: dict[str, Attention] = {IN_ONE_KERNEL: in_one_kernel, ONE_BY_ONE: one_by_one}


def has_kernel(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `in_one_kernel` takes what a model of this configuration computes in `dtype` on `device`."""
    head = _head_size(config)
    return device.type == "cuda" and dtype in KERNEL_DTYPES and head % 8 == 0 and head <= LARGEST_HEAD


def attention_of(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the one for such a model; a slow one on a GPU is said."""
    if has_kernel(config, device, dtype):
        return IN_ONE_KERNEL
    if device.type == "cuda":
        logger.warning(
            "%s: no GPU kernel takes %s and heads of %d numbers, so attention goes through the sequences one by one (slow)",
            *(KEY, dtype, _head_size(config)),
        )
    return ONE_BY_ONE


def _head_size(config: PretrainedConfig) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


# ---- as a layer of Transformers calls it -----------------------------------------------------------------------


def keywords(row: Unpadded) -> dict[str, Any]:
    """What a Transformers model is called with: it hands the last two on to its layers' attention."""
    return {
        "input_ids": row.input_ids,
        "position_ids": row.positions,
        "cu_seq_lens_q": row.ends.cumulated,
        "max_length_q": row.ends.longest,
    }


def _of_layer(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: Any,
) -> torch.Tensor:
    return attention(query, key, value, Ends(cu_seq_lens_q, max_length_q), scale)


for _name, _attention in ATTENTIONS.items():
    register_attention(_name, partial(_of_layer, _attention))
