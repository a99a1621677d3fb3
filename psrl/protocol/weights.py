"""Messages between trainer ranks that hold published weights and the instances that read them; a shard's layout.

Only bookkeeping travels here; the bytes are read straight out of the publisher's memory.
"""

from __future__ import annotations

import msgspec


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """Rows [row_start, row_start + rows) of one tensor (dim 0), at bytes [offset, offset + nbytes) of its payload.

    A tensor without dimensions counts as one row. `dtype` is the name without its module ("bfloat16"), after the cast.
    """

    name: str
    full_shape: tuple[int, ...]
    dtype: str
    row_start: int
    rows: int
    offset: int
    nbytes: int


class ShardLayout(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one of `num_ranks` trainer ranks publishes: its entries in one flat payload of `nbytes` bytes."""

    rank: int
    num_ranks: int
    nbytes: int
    entries: tuple[ShardEntry, ...]


class WeightMessage(msgspec.Struct, array_like=True, kw_only=True, tag=True):
    """Base of every message here. `read` is the reader's own number for one attempt: a late answer is told by it."""

    read: int


class OpenRead(WeightMessage):
    """Reader -> publisher: keep this version in place for `lease_s` seconds, I am about to read it.

    `known_agent` is the publisher's agent whose layout and metadata the reader still holds ("" for none): they are
    sent only to a reader that does not know them yet.
    """

    version: int
    incarnation: int
    lease_s: float
    known_agent: str


class ReadGranted(WeightMessage):
    """Publisher -> reader: the slot lies at [address, address + nbytes) of `device`, header first.

    `sequence` and `checksum` are those of the version asked for: they stand in the header as long as the slot is whole.
    `metadata` is empty and `layout` null when the reader knows `agent` already.
    """

    agent: str
    address: int
    nbytes: int
    device: int
    sequence: int
    checksum: int
    metadata: bytes
    layout: ShardLayout | None


class ReadRefused(WeightMessage):
    """Publisher -> reader: not now; `cause` is one sentence that names what is held instead."""

    cause: str


class CloseRead(WeightMessage):
    """Reader -> publisher: done with it, well or badly."""


ToPublisher = OpenRead | CloseRead
FromPublisher = ReadGranted | ReadRefused


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """The json beside a payload file of the filesystem channel, written last: where it stands, the payload is whole."""

    version: int
    incarnation: int
    checksum: int
    layout: ShardLayout
