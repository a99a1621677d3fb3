"""The configuration of a rollout engine in vLLM's words. Pure; imports no vLLM."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from psrl.config.schema import RolloutEngineConfig

WORKER_EXTENSION = "psrl.rollout.engines.vllm_worker.PsrlWorker"

NO_CHOICE: Mapping[str, Any] = {
    "skip_tokenizer_init": True,  # tokens in, tokens out
    "generation_config": "vllm",  # nothing but the request decides how to sample
    "load_format": "dummy",  # the first pull brings the weights
    "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from: temperature applied
    "worker_extension_cls": WORKER_EXTENSION,
    "disable_log_stats": False,  # its figures are what routing goes by
}
"""What psrl cannot do without. A user's engine_kwargs must not name these."""


def user_options(gen: RolloutEngineConfig) -> dict[str, Any]:
    """What the configuration says of vLLM alone: keys with verl's names first, then `engine_kwargs.vllm` as it stands."""
    options = {
        "tensor_parallel_size": gen.tensor_model_parallel_size,
        "pipeline_parallel_size": gen.pipeline_model_parallel_size,
        "gpu_memory_utilization": gen.gpu_memory_utilization,
        "enforce_eager": gen.enforce_eager,
        "enable_prefix_caching": gen.enable_prefix_caching,
    }
    if gen.max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = gen.max_num_batched_tokens
    return options | gen.engine_kwargs.vllm


def engine_arguments(
    directory: Path,
    *,
    dtype: str,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_bytes: int | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs for the model in `directory`. `kv_cache_bytes`: on a CPU, where a share of the
    memory would be a share of everybody's; None lets `gpu_memory_utilization` decide."""
    arguments = {
        "model": str(directory),
        "dtype": dtype,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
    }
    if kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    return {**arguments, **options, **NO_CHOICE}


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Of one GPU: the weights that decode, and new ones that arrive beside them."""

    held: int
    arriving: int


def weight_bytes(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], options: Mapping[str, Any]) -> WeightBytes:
    """What arrives is the GPU's own slices; where those cannot be written in place (experts, quantized weights) it is the whole
    tensors of its pipeline stage, which it cuts itself."""
    stage = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())
    stage //= options.get("pipeline_parallel_size", 1)
    held = stage // options.get("tensor_parallel_size", 1)
    whole = bool(options.get("quantization")) or any(".experts." in name for name in specs)
    return WeightBytes(held=held, arriving=stage if whole else held)


def share_without_arrivals(share: float, device_bytes: int, weights: WeightBytes) -> float:
    """What is left of `gpu_memory_utilization` for vLLM: new weights arrive in memory of their own, beside those that decode, and
    vLLM would fill it with keys and values. ValueError if that leaves nothing to decode with.

    >>> share_without_arrivals(0.9, 80 * 2**30, WeightBytes(held=8 * 2**30, arriving=8 * 2**30))
    0.8
    """
    left = share - weights.arriving / device_bytes
    if left * device_bytes <= weights.held:
        raise ValueError(
            f"gen_actor_rollout_ref.rollout.gpu_memory_utilization={share} of {device_bytes / 2**30:.1f} GiB is too little: each GPU "
            f"must hold {weights.held / 2**30:.1f} GiB of weights that decode, {weights.arriving / 2**30:.1f} GiB that arrive and a KV "
            "cache; take more, or more GPUs an instance"
        )
    return left


def kv_bytes_a_token(model: Mapping[str, Any], dtype_bytes: int) -> int:
    """Bytes of keys and values that one token takes, from the contents of a model's config.json.

    >>> kv_bytes_a_token({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}, 4)
    256
    """
    kv_heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    return 2 * model["num_hidden_layers"] * kv_heads * head_dim(model) * dtype_bytes


def head_dim(model: Mapping[str, Any]) -> int:
    """Size of one attention head, from the contents of a model's config.json."""
    return model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]


def engine_seed(run_seed: int, instance: str, start: str) -> int:
    """Seed of what an engine draws for all of its samples together: another one for each start of each instance, since engines
    that began alike would give the samples of a group the same responses."""
    return zlib.crc32(f"{run_seed} {instance} {start}".encode())


def draw_seed(seed: int, prefix_tokens: int) -> int:
    """Seed of a continuation's draws, in [0, 2^63): another one for each place where a sample is taken up again, since a
    sampler that begins anew would repeat the draws of the response's first tokens (splitmix64's finalizer)."""
    z = (seed + (prefix_tokens + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1
