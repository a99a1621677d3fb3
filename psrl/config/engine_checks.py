"""What the rollout engines refuse before anything starts. Pure: whether vLLM is there is an argument."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from psrl.config.cache_blocks import cache_block_size
from psrl.config.errors import ConfigError
from psrl.config.schema import Config, RolloutEngineConfig

ROLLOUT = "gen_actor_rollout_ref.rollout"
FIXED_BY_PSRL = (
    "skip_tokenizer_init",
    "generation_config",
    "load_format",
    "logprobs_mode",
    "worker_extension_cls",
    "disable_log_stats",
)
"""vLLM's arguments that psrl cannot leave to the user."""
HAS_A_KEY = {
    "model": "model.path",
    "dtype": f"{ROLLOUT}.dtype",
    "max_num_seqs": f"{ROLLOUT}.max_num_seqs",
    "max_model_len": f"{ROLLOUT}.max_model_len",
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "pipeline_parallel_size": f"{ROLLOUT}.pipeline_model_parallel_size",
    "data_parallel_size": "psrl.deployment.n_rollout_instances",
    "gpu_memory_utilization": f"{ROLLOUT}.gpu_memory_utilization",
    "enforce_eager": f"{ROLLOUT}.enforce_eager",
    "max_num_batched_tokens": f"{ROLLOUT}.max_num_batched_tokens",
    "enable_prefix_caching": f"{ROLLOUT}.enable_prefix_caching",
    "seed": "seed",
    "kv_events_config": "psrl.rollout_coordination.routing_strategy.method=cache_aware",
}
"""vLLM's arguments that are keys of their own."""
VLLM_ONLY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
    "max_num_batched_tokens",
    "seed_samples",
    "engine_kwargs",
)


def has_vllm() -> bool:
    """Whether vLLM can be imported."""
    return importlib.util.find_spec("vllm") is not None


def check_engine(config: Config, *, vllm_installed: bool) -> None:
    """Refuse what the chosen engine cannot do (ConfigError, one sentence)."""
    gen = config.gen_actor_rollout_ref.rollout
    if cache_block_size(config) and not gen.enable_prefix_caching:
        raise ConfigError(
            f"psrl.rollout_coordination.routing_strategy.method={config.psrl.rollout_coordination.routing_strategy.method} goes by what "
            f"engines have cached but {ROLLOUT}.enable_prefix_caching=False: set it to True, or use another method."
        )
    if gen.name != "vllm":
        _refuse_vllm_keys(gen)
        return
    if not 0 < gen.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"{ROLLOUT}.gpu_memory_utilization={gen.gpu_memory_utilization} is refused: it must be greater than 0 and at most 1."
        )
    for name in gen.engine_kwargs.vllm:
        if name in FIXED_BY_PSRL:
            raise ConfigError(f"{ROLLOUT}.engine_kwargs.vllm.{name} is refused: psrl sets it itself; leave it out.")
        if name in HAS_A_KEY:
            raise ConfigError(f"{ROLLOUT}.engine_kwargs.vllm.{name} is refused: set {HAS_A_KEY[name]} instead.")
    ranks, gpus = (
        gen.tensor_model_parallel_size * gen.pipeline_model_parallel_size,
        config.psrl.deployment.rollout_ngpus_per_node_per_instance,
    )
    if ranks != gpus:
        raise ConfigError(
            f"{ROLLOUT}.tensor_model_parallel_size={gen.tensor_model_parallel_size} x "
            f"pipeline_model_parallel_size={gen.pipeline_model_parallel_size} needs {ranks} GPUs an instance, but "
            f"psrl.deployment.rollout_ngpus_per_node_per_instance={gpus}: make both the same."
        )
    _refuse_filtered_log_probs(config)
    if not vllm_installed:
        raise ConfigError(
            f"{ROLLOUT}.name=vllm but the vllm package is not installed: `pip install 'psrl[vllm]'` (docs/vllm.md, also for "
            f"machines without a GPU), or {ROLLOUT}.name=torch."
        )


def check_engine_model(config: Config, model: Mapping[str, Any]) -> None:
    """Refuse a model (the contents of its config.json) that an engine's GPUs cannot share as the configuration asks."""
    gen = config.gen_actor_rollout_ref.rollout
    ways, stages = gen.tensor_model_parallel_size, gen.pipeline_model_parallel_size
    layers, heads = model.get("num_hidden_layers"), model.get("num_attention_heads", ways)
    if heads % ways:
        raise ConfigError(
            f"{ROLLOUT}.tensor_model_parallel_size={ways} does not divide the model's attention heads ({heads}): choose a divisor."
        )
    if layers is not None and stages > layers:
        raise ConfigError(
            f"{ROLLOUT}.pipeline_model_parallel_size={stages} is more than the model's {layers} layers: use fewer stages."
        )


def _refuse_filtered_log_probs(config: Config) -> None:
    gen = config.gen_actor_rollout_ref.rollout
    if config.psrl.log_prob.enable_rollout_engine_log_prob and (gen.top_p < 1 or gen.top_k > 0):
        raise ConfigError(
            f"{ROLLOUT}.name=vllm gives log-probs of what is left after top_p and top_k, which the trainer's cannot be compared "
            f"with: leave {ROLLOUT}.top_p={gen.top_p} at 1 and top_k={gen.top_k} at -1, or set "
            "psrl.log_prob.enable_rollout_engine_log_prob=False."
        )


def _refuse_vllm_keys(gen: RolloutEngineConfig) -> None:
    usual = RolloutEngineConfig()
    for name in VLLM_ONLY:
        value = getattr(gen, name)
        if value != getattr(usual, name):
            raise ConfigError(
                f"{ROLLOUT}.{name}={value} has no meaning with {ROLLOUT}.name={gen.name}: leave it out, or set {ROLLOUT}.name=vllm."
            )
