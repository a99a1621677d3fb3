"""What a model's config.json says of its experts, and which sizes of them can be computed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psrl.config.errors import ConfigError

EXPERTS_MULTIPLE = 8
"""torch's grouped matrix product, which Hugging Face's models use too, takes experts of such sizes (rows of whole 16 bytes in bfloat16)."""


def num_experts(model: Mapping[str, Any]) -> int:
    """In each layer; 0 without any."""
    return model.get("num_experts") or model.get("num_local_experts") or 0


def check_expert_sizes(model: Mapping[str, Any]) -> None:
    """ConfigError for experts that no grouped product takes: training would end at its first step."""
    sizes = (model.get("hidden_size") or 0, model.get("moe_intermediate_size") or model.get("intermediate_size") or 0)
    if num_experts(model) and any(size % EXPERTS_MULTIPLE for size in sizes):
        raise ConfigError(
            f"This {model.get('model_type')} model has experts of {sizes[0]} x {sizes[1]}; their products take multiples of "
            f"{EXPERTS_MULTIPLE} only: take another model."
        )
