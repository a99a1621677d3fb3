"""Attention of our own in the place of a Transformers model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface


def register_attention(name: str, attend: Callable[..., torch.Tensor]) -> None:
    """From now on a model may be told to use `attend` by this name (`config._attn_implementation`). Its layers call
    `attend(query, key, value, scale, **keywords)`, [rows, heads, tokens, d] each, key and value with fewer heads, and want
    [rows, tokens, heads, d]. Among the keywords are those that the model was called with and does not know. Never a mask."""

    def of_layer(
        _module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        scaling: float | None = None,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        return attend(query, key, value, scaling, **keywords), None

    AttentionInterface.register(name, of_layer)
