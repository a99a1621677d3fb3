"""Which models the Megatron-core backend trains, and how ranks may share them. Pure: a model is the contents of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psrl.config.errors import ConfigError
from psrl.config.experts import num_experts
from psrl.config.megatron import MegatronConfig

ACTOR = "train_actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Their model_type."""
ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings whose frequencies do not depend on the length and that leave the attention scores alone."""
OTHER = f"use {ACTOR}.strategy=fsdp2"


def check_megatron_model(model: Mapping[str, Any], settings: MegatronConfig) -> None:
    """ConfigError for a model that the backend does not have, or that ranks cannot share as `settings` say."""
    _check_kind(model)
    _check_sharing(model, settings)


def _check_kind(model: Mapping[str, Any]) -> None:
    kind = model.get("model_type")
    if kind not in MODELS:
        raise ConfigError(f"{ACTOR}.strategy=megatron trains {', '.join(MODELS)}, not {kind}: {OTHER}.")
    layers = set(model.get("layer_types") or ("full_attention",))
    bias = bool(model.get("attention_bias") or model.get("mlp_bias"))
    activation, rope = model.get("hidden_act", "silu"), _rope_type(model)
    if layers != {"full_attention"} or bias or activation != "silu" or rope not in ROPE_TYPES:
        raise ConfigError(
            f"{ACTOR}.strategy=megatron has full attention, no biases, silu and rope type {'/'.join(ROPE_TYPES)} only; this {kind} model "
            f"has attention of the kinds {sorted(layers)}, biases={bias}, activation {activation} and rope type {rope}: {OTHER}."
        )
    if num_experts(model) and (model.get("mlp_only_layers") or model.get("decoder_sparse_step", 1) != 1):
        raise ConfigError(
            f"{ACTOR}.strategy=megatron has experts in every layer or in none; this {kind} model has dense layers among those with "
            f"experts: {OTHER}."
        )


def _check_sharing(model: Mapping[str, Any], settings: MegatronConfig) -> None:
    heads, experts = model.get("num_attention_heads", 1), num_experts(model)
    size, sharing = settings.tensor_model_parallel_size, settings.expert_model_parallel_size
    divided = {
        "attention heads": heads,
        "key-value heads": model.get("num_key_value_heads") or heads,
        "hidden size": model.get("hidden_size", size),
        "feed-forward size": 0 if experts else model.get("intermediate_size", size),
    }
    for what, number in divided.items():
        if number % size:
            raise ConfigError(
                f"{MEGATRON}.tensor_model_parallel_size={size} does not divide the model's {what} ({number}): choose a divisor."
            )
    if not experts and sharing > 1:
        raise ConfigError(
            f"{MEGATRON}.expert_model_parallel_size={sharing} has no meaning for a model without experts: leave it at 1."
        )
    if experts % (sharing * size):
        raise ConfigError(
            f"{MEGATRON}.expert_model_parallel_size={sharing} x tensor_model_parallel_size={size} does not divide the model's {experts} "
            "experts: choose divisors."
        )
    if heads // size % settings.context_parallel_size:
        raise ConfigError(
            f"{MEGATRON}.context_parallel_size={settings.context_parallel_size} does not divide the {heads // size} attention heads of "
            "each tensor-parallel rank: choose a divisor."
        )
    layers, stages = model.get("num_hidden_layers"), settings.pipeline_model_parallel_size
    if layers is not None and stages > layers:
        raise ConfigError(
            f"{MEGATRON}.pipeline_model_parallel_size={stages} is more than the model's {layers} layers: use fewer stages."
        )


def _rope_type(model: Mapping[str, Any]) -> str:
    """Under the names of transformers 5 and of files from before."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "default")
