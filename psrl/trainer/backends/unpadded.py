"""Rows without their padding: a micro-batch is one row of all its real tokens, and attention stays within each sequence.

The model sees [1, tokens] with positions that begin again at 0 for each sequence; where sequences begin travels as keyword
arguments from the model to its attention, which is one of two functions here: a kernel for sequences of any lengths on a
GPU, PyTorch's usual one for each sequence in turn elsewhere.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from psrl.trainer.backends.base import MicroBatch

logger = logging.getLogger(__name__)

KEY = "train_actor_rollout_ref.actor.use_remove_padding"
IN_ONE_KERNEL, ONE_BY_ONE = "psrl_unpadded_kernel", "psrl_unpadded_one_by_one"
KERNEL_DTYPES, LARGEST_HEAD = (torch.bfloat16, torch.float16), 256

_FEWER_KEY_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""torch 2.11 takes fewer key-value heads than query heads without being told."""


def attend_unpadded(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """From now on `model`, which computes in `dtype` on `device`, takes what `without_padding` gives, and nothing else."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kernel = device.type == "cuda" and dtype in KERNEL_DTYPES and head % 8 == 0 and head <= LARGEST_HEAD
    if device.type == "cuda" and not kernel:
        logger.warning(
            "%s: no GPU kernel takes %s and heads of %d numbers, so attention goes through the sequences one by one (slow)",
            *(KEY, dtype, head),
        )
    config._attn_implementation = IN_ONE_KERNEL if kernel else ONE_BY_ONE


def without_padding(batch: MicroBatch, places: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """(what the model is called with, where in its row the tokens at flat `places` [n] of the batch are, [n]).

    Rows [[a, b, c], [d, e, -]] become a b c d e with positions 0 1 2 0 1, which begin at 0 and 3 and end at 5. The longest
    sequence is as long as the rows are wide, so nothing waits for the device to say how long it is.
    """
    assert batch.layout is None, "rows that share prompts are not one sequence each"
    real, width = batch.attention_mask.flatten(), batch.attention_mask.shape[1]
    kept = real.nonzero().squeeze(-1)
    ends = batch.attention_mask.sum(dim=1).cumsum(0)
    inputs = {
        "input_ids": batch.input_ids.flatten()[kept][None],
        "position_ids": (kept % width)[None],
        "cu_seq_lens_q": F.pad(ends, (1, 0)).to(torch.int32),
        "max_length_q": width,
    }
    return inputs, (real.cumsum(0) - 1)[places]


def _in_one_kernel(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Called by the model's layers: [1, heads, tokens, d] each, key and value with fewer heads -> [1, tokens, heads, d]."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    ends, longest = cu_seq_lens_q, max_length_q
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **_FEWER_KEY_HEADS)
    assert isinstance(out, torch.Tensor)  # a pair only where more is asked for
    return out[None], None


@torch.compiler.disable  # as many operations as there are sequences
def _one_by_one(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As `_in_one_kernel`, in any dtype and on any device."""
    lengths = cu_seq_lens_q.diff().tolist()
    fewer = query.shape[1] != key.shape[1]
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=fewer)
        for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(IN_ONE_KERNEL, _in_one_kernel)
AttentionInterface.register(ONE_BY_ONE, _one_by_one)
