"""How many groups and samples are launched, and how many of them train: one answer for everybody who needs it."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.config.schema import Config


@dataclass(frozen=True, slots=True)
class RedundantSizes:
    """`groups` of `samples` train in a step; `launched_groups` of `launched_samples` are made for it, never fewer."""

    groups: int
    samples: int
    launched_groups: int
    launched_samples: int


def redundant_sizes(config: Config) -> RedundantSizes:
    """The sizes of `psrl.rollout_coordination.redundant_rollout`, with what is null filled in; without redundancy as many
    are launched as train."""
    p, asked = config.psrl, config.psrl.rollout_coordination.redundant_rollout
    if not asked.enable:
        return RedundantSizes(p.staleness_buffer_entries, p.rollout_n, p.staleness_buffer_entries, p.rollout_n)
    groups = asked.alg_global_batch_size or p.staleness_buffer_entries
    samples = asked.alg_rollout_n or p.rollout_n
    return RedundantSizes(
        groups, samples, asked.redundant_global_batch_size or groups, asked.redundant_rollout_n or samples
    )
