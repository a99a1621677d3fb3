"""The engine of a role that generates, as the configuration describes it."""

from __future__ import annotations

import os

import torch

from psrl.colocate.choices import vllm_options
from psrl.models.load import checkpoint_specs, load_engine_model
from psrl.models.resolve import ModelSource
from psrl.role import Role
from psrl.rollout.engines.base import Engine
from psrl.rollout.engines.torch_engine import TorchEngine
from psrl.rollout.engines.vllm_arguments import engine_seed, user_options
from psrl.rollout.lmcache_instance import environment, instance_lmcache, with_transfers
from psrl.rundir.keys import load_keys
from psrl.tasks.prepare import context_length
from psrl.weights.mode import settled_mode


def make_engine(role: Role, source: ModelSource, block_size: int = 0) -> Engine:
    """The engine that `gen_actor_rollout_ref.rollout.name` names, with the run's model. Sets the process' compute threads,
    so call it once and first. `block_size`: of the blocks in which it tells what its prefix cache holds; 0: it tells nothing."""
    gen = role.config.gen_actor_rollout_ref.rollout
    dtype = gen.dtype or role.config.model.dtype
    torch.set_num_threads(role.config.psrl.deployment.rollout_cpu_threads)
    torch.set_num_interop_threads(1)
    if gen.name == "vllm":
        from psrl.rollout.engines.vllm_engine import VllmEngine

        ranks = gen.tensor_model_parallel_size * gen.pipeline_model_parallel_size
        lmcache, asked = instance_lmcache(role, ranks), role.config.psrl.lmcache
        with environment(lmcache.environment if lmcache else {}):
            engine = VllmEngine(
                source.path,
                dtype=dtype,
                specs=checkpoint_specs(source.path, dtype),
                eos_token_ids=source.eos_token_ids,
                max_num_seqs=gen.max_num_seqs,
                max_model_len=context_length(role.config),
                kv_cache_tokens=gen.kv_cache_tokens,
                options={"seed": engine_seed(role.config.seed, role.name, f"{role.attempt} {os.getpid()}")}
                | user_options(gen)
                | vllm_options(role.config),
                run=load_keys(role.run_dir).server_public,
                kv_transfer_config=lmcache.kv_transfer_config if lmcache else None,
                tag_versions=lmcache is not None and asked.multi_version_kv,
                empty_offload=asked.clear_on_weight_update,
                block_size=block_size,
                seed_samples=gen.seed_samples,
                arrivals=settled_mode(role.run_dir) == "nixl",
            )
        return with_transfers(role, engine)
    return TorchEngine(
        load_engine_model(source.path, dtype),
        eos_token_ids=source.eos_token_ids,
        max_num_seqs=gen.max_num_seqs,
        max_model_len=context_length(role.config),
        kv_cache_tokens=gen.kv_cache_tokens,
        enable_prefix_caching=gen.enable_prefix_caching,
        block_size=block_size,
    )
