"""The records of the journal: everything that changes the coordinator's durable state, and nothing else.

A record states a decision that was already made, so replaying the records in order rebuilds the state exactly.
Versions, buffers and groups are plain integers; buffer b is trained with weights b and gives version b + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from psrl.protocol.samples import SampleRef

REQUEUED = "requeued"  # the prompt returns to the queue, once
DROPPED = "dropped"  # the prompt is not tried again

REASON_REDUNDANT = "redundant"  # enough others finished first
REASON_RESTART = "restart"  # the processes that worked on it are gone
REASON_END_OF_DATA = "end_of_data"  # finished, but the data fills no further whole buffer
REASON_FILTERED = "filtered"  # finished, but its rewards carry no signal
REASON_STRAGGLER = "straggler"  # it held up the trainer's buffer and is made again

FAILURE_REASONS = frozenset({"error", "timeout", "invalid_rewards"})
"""Reasons that count as a try of the prompt; being aborted for any other reason uses up no retry."""
YIELDING_REASONS = frozenset({REASON_REDUNDANT, REASON_STRAGGLER})
"""Reasons for which a group gives way to others; the prompt is protected from both when it comes again."""


class Position(NamedTuple):
    """A prompt's place in the data: (`data_epoch`, `prompt`) is unique in a run; `attempt` counts its failed tries.

    `protected`: it gave way to others before, and does not do so again, or prompts with long responses would starve.
    """

    data_epoch: int
    prompt: int
    attempt: int = 0
    protected: bool = False


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of every record."""


class Epoch(Record, frozen=True, tag="epoch"):
    """First record of a segment: this coordinator start is number `epoch`. `history` lists, oldest first, the older
    segments that count and how many bytes of each; whatever else they hold, now or later, is fenced off."""

    epoch: int
    nonce: str
    history: list[tuple[str, int]]


class Start(Record, frozen=True, tag="start"):
    """A trainer started from the checkpoint at `version` (0: the initial weights)."""

    incarnation: int
    version: int
    start_nonce: str


class Reserve(Record, frozen=True, tag="rsv"):
    """`group` will be made from this prompt, starting at `instance`, whose weights `version` become the group's V."""

    group: int
    data_epoch: int
    prompt: int
    version: int
    instance: str
    attempt: int
    protected: bool = False

    @property
    def position(self) -> Position:
        """The prompt behind the group."""
        return Position(self.data_epoch, self.prompt, self.attempt, self.protected)


class Occupy(Record, frozen=True, tag="occ"):
    """`group` is generated, rewarded and sealed at `ref`; it will be trained in `buffer`."""

    group: int
    buffer: int
    ref: SampleRef
    reward_mean: float
    response_tokens: int


class Release(Record, frozen=True, tag="rel"):
    """`group` will not be trained. `outcome` is "requeued" or "dropped"."""

    group: int
    reason: str
    outcome: str
    detail: str = ""


class Take(Record, frozen=True, tag="take"):
    """These groups, in batch order, were cut into a batch or a chunk of `buffer`."""

    buffer: int
    groups: list[int]


class Publish(Record, frozen=True, tag="pub"):
    """Weights `version` can be pulled; buffer `version` - 1 is consumed."""

    version: int


class Checkpoint(Record, frozen=True, tag="ckpt"):
    """The checkpoint at `version` is complete: buffers below it need never be trained again."""

    version: int


class ShortBuffer(Record, frozen=True, tag="short"):
    """The data is used up: what is left was packed without gaps and `buffer` is the last one, with `size` groups (a
    whole step's, or fewer). Buffer 0 with size 0: not one group was made."""

    buffer: int
    size: int


class End(Record, frozen=True, tag="end"):
    """The run ended: status completed | failed | interrupted."""

    status: str
    cause: str


AnyRecord = Epoch | Start | Reserve | Occupy | Release | Take | Publish | Checkpoint | ShortBuffer | End
