"""Every value that is refused and every combination that cannot be, in one place. Pure: facts from outside are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psrl.config import agents_checks, algorithm_checks, colocate_checks, critic_checks, model_checks
from psrl.config.agents_checks import check_agents
from psrl.config.algorithm_checks import check_algorithm
from psrl.config.backend_checks import check_backend, has_megatron
from psrl.config.colocate_checks import check_colocate
from psrl.config.critic_checks import check_critic
from psrl.config.engine_checks import check_engine, has_vllm
from psrl.config.errors import ConfigError
from psrl.config.flat import flatten
from psrl.config.lmcache_checks import check_lmcache, has_lmcache
from psrl.config.model_checks import check_model_choice
from psrl.config.overlap import GRANULARITIES, SCOPES
from psrl.config.overlap_checks import check_overlap
from psrl.config.redundancy_checks import check_redundancy
from psrl.config.routing_checks import check_routing, routing_warnings
from psrl.config.schema import Config
from psrl.config.session_checks import check_sessions, session_warnings
from psrl.config.sync_checks import check_sync, sync_warnings
from psrl.config.validation_checks import check_validation
from psrl.config.weight_checks import check_weights

CHOICES: dict[str, tuple[Any, ...]] = {
    "psrl.ps_mode": ("auto", "nixl", "filesystem"),
    "psrl.weights.route": ("auto", "vram", "shm", "nixl"),
    "psrl.deployment.rollout_nnodes_per_instance": (1,),
    "psrl.fine_grain_overlap.granularity": GRANULARITIES,
    "psrl.fine_grain_overlap.overlap_scope": SCOPES,
    "model.dtype": ("float32", "bfloat16"),
    "gen_actor_rollout_ref.rollout.name": ("torch", "vllm"),
    "gen_actor_rollout_ref.rollout.dtype": (None, "float32", "bfloat16"),
    "train_actor_rollout_ref.actor.strategy": ("fsdp2", "megatron"),
    "train_actor_rollout_ref.actor.mixed_precision": ("float32", "bfloat16"),
    "train_actor_rollout_ref.actor.optim.lr_scheduler_type": ("constant", "cosine"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "data.truncation": ("skip", "error"),
    **agents_checks.CHOICES,
    **algorithm_checks.CHOICES,
    **colocate_checks.CHOICES,
    **critic_checks.CHOICES,
}
AT_LEAST: dict[str, float] = {
    "psrl.staleness": 0,
    "psrl.staleness_buffer_entries": 1,
    "psrl.rollout_n": 1,
    "psrl.max_group_retries": 0,
    "psrl.fine_grain_overlap.multiplier": 1,
    "psrl.status_collection.engine_sync_interval_in_ms": 1,
    "psrl.status_collection.coordinator_sync_interval_in_ms": 1,
    "psrl.deployment.n_rollout_instances": 1,
    "psrl.deployment.rollout_ngpus_per_node_per_instance": 1,
    "psrl.deployment.rollout_ngpus_per_node": 1,
    "psrl.deployment.train_nnodes": 1,
    "psrl.deployment.train_ngpus_per_node": 1,
    "psrl.deployment.n_agent_loops": 1,
    "psrl.deployment.train_cpu_threads": 1,
    "psrl.deployment.rollout_cpu_threads": 1,
    "psrl.fault_tolerance.max_restarts": 0,
    "psrl.fault_tolerance.agent_loop_max_restarts": 0,
    "psrl.fault_tolerance.coordinator_max_restarts": 0,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.reasoning_gym.size": 1,
    "reward.num_workers": 1,
    "gen_actor_rollout_ref.rollout.temperature": 0.0,
    "gen_actor_rollout_ref.rollout.max_num_seqs": 1,
    "gen_actor_rollout_ref.rollout.kv_cache_tokens": 1,
    "gen_actor_rollout_ref.rollout.max_model_len": 2,
    "gen_actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "gen_actor_rollout_ref.rollout.pipeline_model_parallel_size": 1,
    "gen_actor_rollout_ref.rollout.max_num_batched_tokens": 1,
    "train_actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "train_actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    "train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1,
    "train_actor_rollout_ref.actor.ppo_epochs": 1,
    "train_actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    "train_actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 1,
    "train_actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 1,
    "train_actor_rollout_ref.actor.megatron.context_parallel_size": 1,
    "train_actor_rollout_ref.actor.megatron.expert_model_parallel_size": 1,
    "train_actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
    "train_actor_rollout_ref.actor.optim.min_lr_ratio": 0,
    "trainer.total_training_steps": 1,
    "trainer.total_epochs": 1,
    "trainer.keep_last": 1,
    **agents_checks.AT_LEAST,
    **algorithm_checks.AT_LEAST,
    **critic_checks.AT_LEAST,
    **model_checks.AT_LEAST,
}
POSITIVE: tuple[str, ...] = (
    "psrl.fault_tolerance.hello_timeout_s",
    "psrl.fault_tolerance.heartbeat_interval_s",
    "psrl.fault_tolerance.heartbeat_timeout_s",
    "psrl.fault_tolerance.fence_s",
    "psrl.fault_tolerance.startup_timeout_s",
    "psrl.fault_tolerance.drain_grace_s",
    "psrl.fault_tolerance.join_wait_s",
    "psrl.weights.pull_timeout_s",
    "reward.timeout_s",
    "reward.max_memory_gb",
    "trainer.gpu_memory_fraction",
    "train_actor_rollout_ref.actor.optim.lr",
    "train_actor_rollout_ref.actor.grad_clip",
    "gen_actor_rollout_ref.rollout.top_p",
    *agents_checks.POSITIVE,
    *algorithm_checks.POSITIVE,
    *colocate_checks.POSITIVE,
    *critic_checks.POSITIVE,
    *model_checks.POSITIVE,
)
MAY_CHANGE = (
    "trainer.total_training_steps",
    "trainer.device",
    "trainer.gpu_memory_fraction",
    "trainer.logger",
    "trainer.report",
    "trainer.project_name",
    "trainer.experiment_name",
    "psrl.deployment.",
    "psrl.colocate",
    "psrl.tms.",
    "train_actor_rollout_ref.actor.strategy",
    "train_actor_rollout_ref.actor.megatron.",
    "train_actor_rollout_ref.actor.fsdp_config.",
    "train_actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "train_actor_rollout_ref.actor.checkpoint.",
    "run_dir",
    "note",
)
"""Keys and prefixes in which a resumed run may differ from its first start: length, deployment, the trainer's backend and how it
is spread over ranks, logging."""


def check(config: Config, *, only_planned: bool = False) -> list[str]:
    """Refuse what cannot run (ConfigError, one sentence); return warnings. `only_planned`: nothing will run, so what this
    version lacks is a warning."""
    values = flatten(_as_dict(config))
    _check_values(values)
    check_model_choice(config.model)
    check_routing(config)
    check_sessions(config)
    _check_combinations(config)
    check_sync(config)
    check_validation(config)
    check_weights(config)
    redundancy = check_redundancy(config)
    check_backend(config, megatron_installed=only_planned or has_megatron())
    check_engine(config, vllm_installed=only_planned or has_vllm())
    lmcache_warnings = check_lmcache(config, installed=only_planned or has_lmcache())
    algorithm_warnings = check_algorithm(config)
    check_critic(config)
    agents_warnings = check_agents(config)
    overlap_notices = check_overlap(config)
    colocate_notices = check_colocate(config)
    return [
        *algorithm_warnings,
        *overlap_notices,
        *colocate_notices,
        *sync_warnings(config),
        *routing_warnings(config),
        *session_warnings(config),
        *redundancy,
        *lmcache_warnings,
        *agents_warnings,
    ]


def check_data_size(config: Config, num_prompts: int, skipped: int) -> None:
    """The data must fill at least one buffer, unless a short last buffer is asked for."""
    batch = config.psrl.staleness_buffer_entries
    if num_prompts == 0:
        raise ConfigError(
            f"No prompt is left: all {skipped} are longer than data.max_prompt_length={config.data.max_prompt_length} or the context."
        )
    if num_prompts < batch and (config.data.drop_last or config.trainer.total_epochs is None):
        raise ConfigError(
            f"{num_prompts} prompts < batch {batch}: psrl.staleness_buffer_entries={batch} is larger than the data set ({skipped} skipped as too long); "
            f"use a batch of at most {num_prompts}, or more prompts, or trainer.total_epochs with data.drop_last=False."
        )


def check_resume(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on in a run directory that was started with another configuration.

    `before` and `now` are flattened (psrl.config.flat.flatten)."""
    changed = [
        key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and not key.startswith(MAY_CHANGE)
    ]
    if changed:
        key = changed[0]
        more = f" (and {len(changed) - 1} more: {', '.join(changed[1:4])})" if len(changed) > 1 else ""
        raise ConfigError(
            f"{key}={now.get(key)} differs from the {before.get(key)} that run_dir={now.get('run_dir')} was started with{more}: "
            "a resumed run may change only trainer.total_training_steps, psrl.deployment.*, the trainer's backend and logging; use the old value or another run_dir."
        )


def _as_dict(config: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(
        OmegaConf.create(config) if isinstance(config, dict) else OmegaConf.structured(config)
    )


def _check_values(values: Mapping[str, Any]) -> None:
    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            raise ConfigError(
                f"{key}={values[key]} is refused: allowed is {' | '.join('null' if a is None else str(a) for a in allowed)}."
            )
    for key, least in AT_LEAST.items():
        if values[key] is not None and values[key] < least:
            raise ConfigError(f"{key}={values[key]} is refused: it must be at least {least:g}.")
    for key in POSITIVE:
        if not values[key] > 0:
            raise ConfigError(f"{key}={values[key]} is refused: it must be greater than 0.")
    for logger in values["trainer.logger"]:
        if logger not in ("console", "wandb"):
            raise ConfigError(f"trainer.logger names {logger}: allowed are console and wandb.")


def _check_combinations(config: Config) -> None:
    p, actor, gen = config.psrl, config.train_actor_rollout_ref.actor, config.gen_actor_rollout_ref.rollout
    mini = actor.ppo_mini_batch_size
    if mini and p.staleness_buffer_entries % mini:
        raise ConfigError(
            f"train_actor_rollout_ref.actor.ppo_mini_batch_size={mini} does not divide psrl.staleness_buffer_entries={p.staleness_buffer_entries}: "
            "choose a divisor, or null for the whole buffer."
        )
    context = gen.max_model_len
    if context is not None and context <= config.data.max_prompt_length:
        raise ConfigError(
            f"gen_actor_rollout_ref.rollout.max_model_len={context} leaves no room after data.max_prompt_length={config.data.max_prompt_length}: "
            "raise the context or lower the prompt length."
        )
    sources = [
        name
        for name, value in (
            ("data.train_files", config.data.train_files),
            ("data.reasoning_gym.dataset", config.data.reasoning_gym.dataset),
            ("data.task", config.data.task),
        )
        if value
    ]
    if len(sources) != 1:
        what = f"both {' and '.join(sources)} are set" if sources else "no data is named"
        raise ConfigError(f"{what}: set exactly one of data.train_files, data.reasoning_gym.dataset and data.task.")
    drawn = config.data.synthetic_lengths
    if drawn.mean_tokens is not None and not (drawn.mean_tokens >= 1 and drawn.sigma >= 0):
        raise ConfigError(
            f"data.synthetic_lengths.mean_tokens={drawn.mean_tokens:g} with data.synthetic_lengths.sigma={drawn.sigma:g} is refused: allowed is a mean of "
            "at least 1 and a sigma of at least 0."
        )
    if drawn.mean_tokens is not None and not gen.ignore_eos:
        raise ConfigError(
            f"data.synthetic_lengths.mean_tokens={drawn.mean_tokens:g} decides where responses end, but an end-of-text token would too: set "
            "gen_actor_rollout_ref.rollout.ignore_eos=True, or leave mean_tokens null."
        )
    if config.trainer.total_training_steps is None and config.trainer.total_epochs is None:
        raise ConfigError("The run has no end: set trainer.total_training_steps or trainer.total_epochs.")
    if config.trainer.gpu_memory_fraction > 1:
        raise ConfigError(
            f"trainer.gpu_memory_fraction={config.trainer.gpu_memory_fraction} is refused: it is a share of a GPU's memory, at most 1."
        )
    if actor.optim.lr_scheduler_type == "cosine" and config.trainer.total_training_steps is None:
        raise ConfigError(
            "train_actor_rollout_ref.actor.optim.lr_scheduler_type=cosine needs the length of the run: set trainer.total_training_steps."
        )
