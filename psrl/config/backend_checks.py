"""What the trainer backends refuse before anything starts. Pure: whether megatron-core is there is an argument."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from math import prod
from typing import Any

from psrl.config.actor import ranks_of_a_row
from psrl.config.errors import ConfigError
from psrl.config.experts import check_expert_sizes
from psrl.config.megatron_models import ACTOR, MEGATRON, check_megatron_model
from psrl.config.schema import Config

SHARING = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Sizes whose product is the number of ranks that work on the same samples."""


def has_megatron() -> bool:
    """Whether megatron-core can be imported."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def check_backend(config: Config, *, megatron_installed: bool) -> None:
    """Refuse what the chosen backend cannot do (ConfigError, one sentence)."""
    _check_token_budget(config)
    if config.train_actor_rollout_ref.actor.strategy == "megatron":
        _check_megatron(config, megatron_installed)
    else:
        _check_fsdp(config)


def _check_token_budget(config: Config) -> None:
    actor, data = config.train_actor_rollout_ref.actor, config.data
    if actor.ppo_micro_batch_size_per_gpu is not None and not actor.use_dynamic_bsz:
        return  # micro-batches count samples
    context = config.gen_actor_rollout_ref.rollout.max_model_len
    longest = min(data.max_prompt_length + data.max_response_length, context or sys.maxsize)
    ranks = ranks_of_a_row(actor)
    least = -(-longest // ranks)
    if actor.ppo_max_token_len_per_gpu < least:
        shared = f", shared by {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"{ACTOR}.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} does not hold the longest sample (data.max_prompt_length="
            f"{data.max_prompt_length} + data.max_response_length={data.max_response_length}{shared}): raise it to at least {least}, "
            "or lower those."
        )


def _check_megatron(config: Config, installed: bool) -> None:
    if not installed:
        raise ConfigError(
            f"{ACTOR}.strategy=megatron but the megatron-core package is not installed: `pip install 'psrl[megatron]'`, "
            f"or {ACTOR}.strategy=fsdp2."
        )
    settings = config.train_actor_rollout_ref.actor.megatron
    _refuse_fsdp_keys(config)
    _check_unpadded(config, f"{MEGATRON}.context_parallel_size", settings.context_parallel_size)
    ranks, given = trainer_ranks(config), {name: getattr(settings, name) for name in SHARING}
    if ranks % prod(given.values()):
        named = " x ".join(f"{name}={size}" for name, size in given.items() if size > 1)
        raise ConfigError(
            f"{MEGATRON}.{named} does not divide the {ranks} trainer ranks (psrl.deployment.train_nnodes x train_ngpus_per_node): "
            "choose a divisor."
        )
    replicas = ranks // settings.tensor_model_parallel_size // settings.pipeline_model_parallel_size
    if replicas % settings.expert_model_parallel_size:
        raise ConfigError(
            f"{MEGATRON}.expert_model_parallel_size={settings.expert_model_parallel_size} does not divide the trainer ranks that have "
            f"the same layers ({replicas}): choose a divisor."
        )


def _check_unpadded(config: Config, key: str, sharing: int) -> None:
    """`sharing`: ranks that share a row, by what `key` says."""
    if config.train_actor_rollout_ref.actor.use_remove_padding and sharing > 1:
        raise ConfigError(
            f"{ACTOR}.use_remove_padding=True cannot be had with {key}={sharing}, which shares rows of equal length: leave one of them out."
        )


def _refuse_fsdp_keys(config: Config) -> None:
    actor = config.train_actor_rollout_ref.actor
    given = {
        "ulysses_sequence_parallel_size": (actor.ulysses_sequence_parallel_size, 1),
        "fsdp_config.fsdp_size": (actor.fsdp_config.fsdp_size, -1),
        "fsdp_config.param_offload": (actor.fsdp_config.param_offload, False),
        "fsdp_config.optimizer_offload": (actor.fsdp_config.optimizer_offload, False),
    }
    for name, (value, usual) in given.items():
        if value != usual:
            raise ConfigError(
                f"{ACTOR}.{name}={value} has no meaning with {ACTOR}.strategy=megatron: leave it at {usual}, or set "
                f"{ACTOR}.strategy=fsdp2."
            )


def _check_fsdp(config: Config) -> None:
    actor, ranks = config.train_actor_rollout_ref.actor, trainer_ranks(config)
    for name in (*SHARING, "expert_model_parallel_size"):
        if (size := getattr(actor.megatron, name)) > 1:
            raise ConfigError(
                f"{MEGATRON}.{name}={size} has no meaning with {ACTOR}.strategy=fsdp2: set {ACTOR}.strategy=megatron, or leave it at 1."
            )
    sharing, shards = actor.ulysses_sequence_parallel_size, actor.fsdp_config.fsdp_size
    if ranks % sharing:
        raise ConfigError(
            f"{ACTOR}.ulysses_sequence_parallel_size={sharing} does not divide the {ranks} trainer ranks "
            "(psrl.deployment.train_nnodes x train_ngpus_per_node): choose a divisor."
        )
    _check_unpadded(config, f"{ACTOR}.ulysses_sequence_parallel_size", sharing)
    if shards == 0 or shards < -1 or (shards > 0 and ranks % shards):
        raise ConfigError(
            f"{ACTOR}.fsdp_config.fsdp_size={shards} does not divide the {ranks} trainer ranks "
            "(psrl.deployment.train_nnodes x train_ngpus_per_node): choose a divisor, or -1 for all of them."
        )


def check_model_layout(config: Config, model: Mapping[str, Any]) -> None:
    """Refuse a model (the contents of its config.json) that the ranks cannot share as the configuration asks."""
    actor = config.train_actor_rollout_ref.actor
    check_expert_sizes(model)
    if actor.strategy == "megatron":
        check_megatron_model(model, actor.megatron)
        return
    if actor.use_remove_padding and not has_full_attention(model):
        raise ConfigError(
            f"{ACTOR}.use_remove_padding=True needs full attention in every layer, which this {model.get('model_type')} model has "
            "not: set it to False."
        )
    heads, size = model.get("num_attention_heads", 1), actor.ulysses_sequence_parallel_size
    if heads % size:
        raise ConfigError(
            f"{ACTOR}.ulysses_sequence_parallel_size={size} does not divide the model's attention heads ({heads}): choose a divisor."
        )


def has_full_attention(model: Mapping[str, Any]) -> bool:
    """No layer of this model (the contents of its config.json) looks through a window."""
    kinds = set(model.get("layer_types") or ("full_attention",))
    window = model.get("sliding_window") if model.get("use_sliding_window", True) else None
    return kinds == {"full_attention"} and window is None


def sharing_ranks(config: Config) -> int:
    """Trainer ranks that work on the same samples."""
    actor = config.train_actor_rollout_ref.actor
    if actor.strategy == "megatron":
        return prod(getattr(actor.megatron, name) for name in SHARING)
    return actor.ulysses_sequence_parallel_size


def trainer_ranks(config: Config) -> int:
    """Trainer ranks of the whole run."""
    return config.psrl.deployment.train_nnodes * config.psrl.deployment.train_ngpus_per_node
