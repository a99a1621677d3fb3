"""Settings and small choices around routing: which weights are preferred, what of a prompt is known, how a sample's cache
blocks are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from psrl.coordinator.waiting import SMALL_ID

VERSION, RESERVE_CAPABILITY = "version", "reserve_capability"

PATIENCE_INTERVALS = 60
"""A sample that has waited this many check intervals is next, whatever the order, and is held back no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingSettings:
    sort: str = SMALL_ID
    """Which waiting sample goes first, see WaitingQueue."""
    oldest_version_first: bool = False
    candidates: str = VERSION
    """Which weights a new group prefers, see `preferred`."""
    group_sticky: bool = False
    """A sample on the move goes where most of its group is."""
    trajectory_sticky: bool = False
    """A sample on the move goes back to where it was."""
    check_interval_s: float = 0.5
    """Longest time until what waits is considered again."""
    request_budget: int = 1024
    """Response tokens expected of a prompt when nothing is known of it or of its data source."""

    @property
    def patience_s(self) -> float:
        return PATIENCE_INTERVALS * self.check_interval_s


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What routing may know of a prompt."""

    tokens: int = 0
    data_source: str = ""
    blocks: tuple[int, ...] = ()
    """A name for each whole cache block of the prompt that stands for everything up to the end of that block; equal names,
    equal tokens. The tokens themselves stay outside the coordinator."""


def no_facts(prompt: int) -> PromptFacts:
    """For methods that ask nothing about prompts."""
    return PromptFacts()


def preferred(versions: Iterable[int], candidates: str, room: Callable[[int], int]) -> list[int]:
    """Versions in the order in which equally good instances are preferred: the newest first (version), or those that the
    most groups may still be reserved with first (reserve_capability; the newest among equals).

    >>> preferred([3, 4, 5], RESERVE_CAPABILITY, {3: 0, 4: 9, 5: 9}.get)
    [5, 4, 3]
    """
    if candidates == RESERVE_CAPABILITY:
        return sorted(versions, key=lambda version: (-room(version), -version))
    return sorted(versions, reverse=True)


def sample_blocks(
    prompt: PromptFacts, block_size: int, group: int, sample: int, response_tokens: int
) -> tuple[int, ...]:
    """Names of the whole blocks of a sample in the making: those of its prompt, then its own, which nobody shares.

    With blocks of 16, a prompt of 40 tokens and 30 of the response fill four: two of the prompt, two of the sample.
    """
    total = (prompt.tokens + response_tokens) // block_size if block_size else 0
    own = range(len(prompt.blocks), total)
    return (*prompt.blocks, *(hash((group, sample, i)) for i in own))
