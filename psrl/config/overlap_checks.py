"""What `psrl.fine_grain_overlap` comes to with the other keys: its effective chunk, and what it cannot be combined with. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from psrl.config.backend_checks import sharing_ranks, trainer_ranks
from psrl.config.errors import ConfigError
from psrl.config.redundancy import redundant_sizes

if TYPE_CHECKING:
    from psrl.config.schema import Config

OVERLAP = "psrl.fine_grain_overlap"
ACTOR = "train_actor_rollout_ref.actor"
WHOLE_BUFFER_ESTIMATORS = ("gae", "reinforce_plus_plus")
"""They whiten advantages with statistics of all samples; the others compare the samples of one group."""


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """What a chunk really is: `granularity` after clamping and its `samples` (none: those of the whole buffer)."""

    granularity: str
    samples: int


def chunk_size(granularity: str, multiplier: int, *, micro_batch: int, mini_batch: int, buffer: int) -> ChunkSize:
    """Clamp a chunk of `multiplier` base units; all sizes in samples, `micro_batch` over all ranks.

    `chunk_size("micro_batch", 3, micro_batch=4, mini_batch=16, buffer=32) == ChunkSize("micro_batch", 12)`; with 5 it is
    ChunkSize("mini_batch", 16). A chunk of exactly one mini-batch stays what it was asked for.
    """
    if granularity == "micro_batch":
        samples = micro_batch * multiplier
        if samples <= mini_batch:
            return ChunkSize("micro_batch", samples)
        granularity, multiplier = "mini_batch", 1
    if granularity == "mini_batch" and mini_batch * multiplier <= buffer:
        return ChunkSize("mini_batch", mini_batch * multiplier)
    return ChunkSize("none", buffer)


def data_parallel_size(config: Config) -> int:
    """Groups of trainer ranks that train on different samples."""
    return max(1, trainer_ranks(config) // sharing_ranks(config))


def effective_chunk(config: Config) -> ChunkSize:
    """The chunk of this configuration."""
    p, actor, sizes = config.psrl, config.train_actor_rollout_ref.actor, redundant_sizes(config)
    return chunk_size(
        p.fine_grain_overlap.granularity,
        p.fine_grain_overlap.multiplier,
        micro_batch=(actor.ppo_micro_batch_size_per_gpu or 1) * data_parallel_size(config),
        mini_batch=(actor.ppo_mini_batch_size or p.staleness_buffer_entries) * sizes.samples,
        buffer=_buffer_samples(config),
    )


def _buffer_samples(config: Config) -> int:
    return config.psrl.staleness_buffer_entries * redundant_sizes(config).samples


def check_overlap(config: Config) -> list[str]:
    """Refuse what cannot be combined (ConfigError, one sentence); return notices of what was clamped or is approximate."""
    overlap = config.psrl.fine_grain_overlap
    if overlap.granularity == "micro_batch":
        _check_micro_batch(config)
    if overlap.overlap_scope == "pre_step":
        _check_pre_step(config)
    if overlap.overlap_scope == "accumulate":
        _check_accumulate(config)
    chunk, notices = effective_chunk(config), []
    if chunk.granularity != overlap.granularity:
        size = "the whole buffer" if chunk.granularity == "none" else f"one mini-batch of {chunk.samples} samples"
        notices.append(
            f"{OVERLAP}.granularity={overlap.granularity} with {OVERLAP}.multiplier={overlap.multiplier} is more than "
            f"{size}: taken as granularity={chunk.granularity}"
            + (f"; lower the multiplier, or {ACTOR}.ppo_mini_batch_size." if chunk.granularity == "none" else ".")
        )
    elif chunk.granularity != "none" and chunk.samples == _buffer_samples(config):
        notices.append(
            f"{OVERLAP}.granularity={overlap.granularity} has chunks as large as the buffer, so nothing overlaps: "
            f"set {ACTOR}.ppo_mini_batch_size to a part of psrl.staleness_buffer_entries."
        )
    estimator = config.algorithm.adv_estimator
    if overlap.overlap_scope == "pre_step" and estimator in WHOLE_BUFFER_ESTIMATORS:
        notices.append(
            f"{OVERLAP}.overlap_scope=pre_step with algorithm.adv_estimator={estimator} whitens advantages within each chunk "
            "rather than over the buffer; recompute is exact, and pre_step is with grpo, rloo and remax."
        )
    if overlap.overlap_scope == "pre_step" and config.algorithm.rollout_correction.rollout_is_batch_normalize:
        notices.append(
            f"{OVERLAP}.overlap_scope=pre_step with algorithm.rollout_correction.rollout_is_batch_normalize=True normalises the weights "
            "within each chunk rather than over the buffer; recompute is exact."
        )
    return notices


def _check_micro_batch(config: Config) -> None:
    actor = config.train_actor_rollout_ref.actor
    if actor.use_dynamic_bsz:
        raise ConfigError(
            f"{OVERLAP}.granularity=micro_batch counts samples but {ACTOR}.use_dynamic_bsz=True counts tokens: set it to False, "
            "or use granularity=mini_batch."
        )
    if actor.ppo_micro_batch_size_per_gpu is None:
        raise ConfigError(
            f"{OVERLAP}.granularity=micro_batch needs {ACTOR}.ppo_micro_batch_size_per_gpu, which is null: set it, or use "
            "granularity=mini_batch."
        )
    if config.psrl.fine_grain_overlap.overlap_scope == "pre_step" and actor.strategy == "megatron":
        raise ConfigError(
            f"{OVERLAP}.granularity=micro_batch with {OVERLAP}.overlap_scope=pre_step is refused for {ACTOR}.strategy=megatron, "
            "whatever the multiplier: use granularity=mini_batch, overlap_scope=recompute, or strategy=fsdp2."
        )


def _check_pre_step(config: Config) -> None:
    overlap, actor = config.psrl.fine_grain_overlap, config.train_actor_rollout_ref.actor
    chunk = effective_chunk(config)
    asked = f"{OVERLAP}.overlap_scope=pre_step takes an optimizer step a mini-batch"
    if overlap.granularity == "none":
        raise ConfigError(
            f"{asked} but {OVERLAP}.granularity=none cuts no chunks: set it to mini_batch, or use overlap_scope=recompute."
        )
    if chunk.granularity == "none":
        raise ConfigError(
            f"{asked} but {OVERLAP}.multiplier={overlap.multiplier} makes a chunk larger than the buffer, which is granularity none: "
            "use a smaller multiplier, or overlap_scope=recompute."
        )
    if chunk.granularity == "micro_batch":
        raise ConfigError(
            f"{asked} but {OVERLAP}.granularity=micro_batch with {OVERLAP}.multiplier={overlap.multiplier} is a chunk of {chunk.samples} "
            "samples, no more than a part of one: use overlap_scope=recompute or accumulate, granularity=mini_batch, or another "
            "multiplier (a chunk above a mini-batch becomes one)."
        )
    if actor.ppo_epochs != 1:
        raise ConfigError(
            f"{asked} and cannot come back to it, but {ACTOR}.ppo_epochs={actor.ppo_epochs}: set it to 1, or use "
            "overlap_scope=recompute or accumulate."
        )


def _check_accumulate(config: Config) -> None:
    estimator, correction = config.algorithm.adv_estimator, config.algorithm.rollout_correction
    asked = f"{OVERLAP}.overlap_scope=accumulate starts the backward passes before the whole buffer is there"
    if estimator in WHOLE_BUFFER_ESTIMATORS:
        raise ConfigError(
            f"{asked} but algorithm.adv_estimator={estimator} needs statistics of all of it: use overlap_scope=recompute, or grpo, "
            "rloo or remax."
        )
    if correction.rollout_is_batch_normalize:
        raise ConfigError(
            f"{asked} but algorithm.rollout_correction.rollout_is_batch_normalize=True needs the weights of all of it: set it to "
            "False, or use overlap_scope=recompute."
        )
    if config.algorithm.use_kl_in_reward and effective_chunk(config).granularity == "micro_batch":
        raise ConfigError(
            f"{asked} but algorithm.use_kl_in_reward=True needs the KL of all samples of a group, and a chunk of {OVERLAP}.granularity="
            "micro_batch may end inside one: use granularity=mini_batch, overlap_scope=recompute, or "
            f"{ACTOR}.use_kl_loss=True instead."
        )
