"""How many groups and samples are launched, and how many of them train: one answer for everybody who needs it."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.config.algorithm_checks import greedy_samples
from psrl.config.schema import Config


@dataclass(frozen=True, slots=True)
class RedundantSizes:
    """`groups` of `samples` make a step; `launched_groups` of `launched_samples` are made for it, never fewer. The greedy
    sample of an estimator that needs one (remax) is among the samples."""

    groups: int
    samples: int
    launched_groups: int
    launched_samples: int


def redundant_sizes(config: Config) -> RedundantSizes:
    """The sizes of `psrl.rollout_coordination.redundant_rollout`, with what is null filled in; without redundancy as many
    are launched as train."""
    p, asked = config.psrl, config.psrl.rollout_coordination.redundant_rollout
    groups, samples, greedy = p.staleness_buffer_entries, p.rollout_n, greedy_samples(config.algorithm.adv_estimator)
    launched_groups = (asked.enable and asked.redundant_global_batch_size) or groups
    launched_samples = (asked.enable and asked.redundant_rollout_n) or samples
    return RedundantSizes(groups, samples + greedy, launched_groups, launched_samples + greedy)
