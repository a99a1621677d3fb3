"""What the trainer backends refuse before anything starts. Pure: whether megatron-core is there is an argument."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from psrl.config.actor import ranks_of_a_row
from psrl.config.errors import ConfigError
from psrl.config.schema import Config

ACTOR = "train_actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
ONLY_ONE = ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
"""Kinds of model parallelism that a user of verl may name and that this version lacks."""

MEGATRON_MODELS = ("llama", "qwen2", "qwen3")
"""model_type of the families that the megatron backend maps."""


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
    for name in ONLY_ONE:
        if getattr(settings, name) > 1:
            raise ConfigError(
                f"{MEGATRON}.{name}={getattr(settings, name)} is not in this version of psrl: use 1, and "
                f"{MEGATRON}.tensor_model_parallel_size for models that do not fit one rank."
            )
    _refuse_fsdp_keys(config)
    size, ranks = settings.tensor_model_parallel_size, trainer_ranks(config)
    if ranks % size:
        raise ConfigError(
            f"{MEGATRON}.tensor_model_parallel_size={size} does not divide the {ranks} trainer ranks "
            "(psrl.deployment.train_nnodes x train_ngpus_per_node): choose a divisor."
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
    size = actor.megatron.tensor_model_parallel_size
    if size > 1:
        raise ConfigError(
            f"{MEGATRON}.tensor_model_parallel_size={size} has no meaning with {ACTOR}.strategy=fsdp2: "
            f"set {ACTOR}.strategy=megatron, or leave it at 1."
        )
    sharing, shards = actor.ulysses_sequence_parallel_size, actor.fsdp_config.fsdp_size
    if ranks % sharing:
        raise ConfigError(
            f"{ACTOR}.ulysses_sequence_parallel_size={sharing} does not divide the {ranks} trainer ranks "
            "(psrl.deployment.train_nnodes x train_ngpus_per_node): choose a divisor."
        )
    if shards == 0 or shards < -1 or (shards > 0 and ranks % shards):
        raise ConfigError(
            f"{ACTOR}.fsdp_config.fsdp_size={shards} does not divide the {ranks} trainer ranks "
            "(psrl.deployment.train_nnodes x train_ngpus_per_node): choose a divisor, or -1 for all of them."
        )


def check_model_layout(config: Config, model: Mapping[str, Any]) -> None:
    """Refuse a model (the contents of its config.json) that the ranks cannot share as the configuration asks."""
    actor = config.train_actor_rollout_ref.actor
    heads = model.get("num_attention_heads", 1)
    if actor.strategy == "megatron":
        if model.get("model_type") not in MEGATRON_MODELS:
            raise ConfigError(
                f"{ACTOR}.strategy=megatron trains {', '.join(MEGATRON_MODELS)}, not {model.get('model_type')}: "
                f"use {ACTOR}.strategy=fsdp2."
            )
        key, size = f"{MEGATRON}.tensor_model_parallel_size", actor.megatron.tensor_model_parallel_size
        divided = {
            "attention heads": heads,
            "key-value heads": model.get("num_key_value_heads", heads),
            "hidden size": model.get("hidden_size", size),
            "feed-forward size": model.get("intermediate_size", size),
        }
    else:
        key, size = f"{ACTOR}.ulysses_sequence_parallel_size", actor.ulysses_sequence_parallel_size
        divided = {"attention heads": heads}
    for what, number in divided.items():
        if number % size:
            raise ConfigError(f"{key}={size} does not divide the model's {what} ({number}): choose a divisor.")


def trainer_ranks(config: Config) -> int:
    """Trainer ranks of the whole run."""
    return config.psrl.deployment.train_nnodes * config.psrl.deployment.train_ngpus_per_node
