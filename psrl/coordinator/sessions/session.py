"""One session: a sample of one or more turns, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.coordinator.waiting import Waiting

GENERATING = (
    "generating"  # a turn is made, or is on its way to be; a turn that was interrupted and looks for a place too
)
AWAY = "away"  # between two turns, its KV kept: at its environment, or back and without a free place
HUNG = "hung"  # between two turns, holding no KV: at its environment, or back and without room for its tokens

Key = tuple[int, int]
"""(group, sample)"""


@dataclass(slots=True, eq=False)
class Session:
    group: int
    sample: int
    version: int
    """The group's: only instances with these weights or newer ones may go on with it."""
    prompt_tokens: int
    """Of `tokens`, those that all samples of its group begin with."""
    tokens: int = 0
    """Prompt, response and environment as of its last turn boundary."""
    state: str = GENERATING
    instance: str = ""
    """Where its tokens count (generating, away), or where it was (hung); "" if nowhere."""
    waiting: Waiting | None = field(default=None, repr=False)
    """Set when it is back from its environment and wants its next turn."""
    pinned: bool = False
    """It was hung and went on at `instance`, and has to stay there."""

    @property
    def key(self) -> Key:
        return self.group, self.sample
