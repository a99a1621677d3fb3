"""When training may begin on which part of a buffer: the chunk plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psrl.config.algorithm_checks import samples_per_group
from psrl.config.overlap_checks import effective_chunk
from psrl.config.schema import Config
from psrl.protocol.control import TakenGroup


@dataclass(frozen=True, slots=True)
class Chunk:
    """Once the first `groups` groups of the buffer are there, work may go on up to sample `samples` of the batch order."""

    groups: int
    samples: int


@dataclass(frozen=True, slots=True)
class Part:
    """What a chunk brings: `groups` that are new, how many `samples` of the whole batch order may be worked on now, and
    whether the buffer ends with it (`last`)."""

    groups: Sequence[TakenGroup]
    samples: int
    last: bool


def plan_chunks(num_groups: int, samples_per_group: int, chunk_samples: int) -> list[Chunk]:
    """Cut a buffer into chunks of `chunk_samples` samples in batch order; the last one is the remainder.

    A group comes whole, its samples go to chunks in order: with groups of 3, chunks of 4 samples need 2, 3 and 4 groups,
    and the second begins inside the second group: `plan_chunks(4, 3, 4) == [Chunk(2, 4), Chunk(3, 8), Chunk(4, 12)]`.
    """
    if min(num_groups, samples_per_group, chunk_samples) < 1:
        raise ValueError(
            f"chunks of {chunk_samples} samples from {num_groups} groups of {samples_per_group}: give at least 1"
        )
    total = num_groups * samples_per_group
    ends = [min(end, total) for end in range(chunk_samples, total + chunk_samples, chunk_samples)]
    return [Chunk(-(-end // samples_per_group), end) for end in ends]


def chunk_plan(config: Config) -> list[Chunk]:
    """Of this configuration; without overlap the whole buffer is the only chunk."""
    return plan_chunks(config.psrl.staleness_buffer_entries, samples_per_group(config), effective_chunk(config).samples)


def whole(groups: Sequence[TakenGroup]) -> list[Part]:
    """A buffer that is all there, as its only part."""
    return [Part(groups, _samples(groups), last=True)]


def recorded_parts(groups: Sequence[TakenGroup], chunks: Sequence[Chunk]) -> list[Part]:
    """The parts of a recorded buffer as they came by this plan; a buffer shorter than planned ends early."""
    parts, taken = [], 0
    for chunk in chunks:
        end = max(taken, min(chunk.groups, len(groups)))
        samples = min(chunk.samples, _samples(groups[:end]))
        last = end == len(groups) and samples == _samples(groups)
        parts.append(Part(groups[taken:end], samples, last))
        if last:
            break
        taken = end
    return parts


def _samples(groups: Sequence[TakenGroup]) -> int:
    return sum(len(group.ref.tokens) for group in groups)
