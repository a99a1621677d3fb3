"""Messages between trainer ranks that hold published weights and the instances that read them; a shard's layout.

Only bookkeeping travels here; the bytes are read straight out of the publisher's memory.
"""

from __future__ import annotations

import msgspec


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of one tensor at bytes [offset, offset + nbytes) of its payload: rows [row_start, row_start + rows) of
    dim 0 and, of these, `columns` [start, stop) of dim 1 (None: all).

    A tensor without dimensions counts as one row. `dtype` is the name without its module ("bfloat16"), after the cast.
    """

    name: str
    full_shape: tuple[int, ...]
    dtype: str
    row_start: int
    rows: int
    offset: int
    nbytes: int
    columns: tuple[int, int] | None = None


class ShardLayout(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one of `num_ranks` trainer ranks publishes: its entries in one flat payload of `nbytes` bytes.

    `sections`: (offset, nbytes) of the payload's parts, each for other readers (`weights.split`); an entry lies in one.
    """

    rank: int
    num_ranks: int
    nbytes: int
    entries: tuple[ShardEntry, ...]
    sections: tuple[tuple[int, int], ...]


class Location(msgspec.Struct, frozen=True, array_like=True):
    """Where a process keeps weights. `host` names the running system, not the container; `gpu` is the uuid of its GPU, ""
    for host memory; `peers`: uuids of the other GPUs whose memory this GPU reads directly. `rdma`: there is network hardware that
    reads memory of other hosts by itself."""

    host: str
    gpu: str = ""
    peers: tuple[str, ...] = ()
    rdma: bool = False


class SharedSlot(msgspec.Struct, frozen=True, array_like=True):
    """A slot in memory that processes of the same host may map: the file `/proc/<pid>/fd/<fd>` of `size` bytes, the slot
    at `offset`. The file begins with `token`: a process that is another one by now is told by it."""

    pid: int
    fd: int
    size: int
    offset: int
    token: bytes


class WeightMessage(msgspec.Struct, array_like=True, kw_only=True, tag=True):
    """Base of every message here. `read` is the reader's own number for one attempt: a late answer is told by it."""

    read: int


class OpenRead(WeightMessage):
    """Reader -> publisher: keep this version in place for `lease_s` seconds, I am about to read it.

    The publisher chooses the way from `location` and `route` ("auto" or a route's name, `weights.route`). `known_agent` is
    the publisher's agent whose metadata the reader still holds and `known_layout` the publisher whose layout it has ("" for
    none): both are sent only to a reader that does not know them yet.
    """

    version: int
    incarnation: int
    lease_s: float
    location: Location
    route: str
    known_agent: str
    known_layout: str


class ReadGranted(WeightMessage):
    """Publisher -> reader: the slot lies at [address, address + nbytes) of `device`, header first.

    `sequence` and `checksums` (of each section) are those of the version asked for: the header says the same as long as the
    slot is whole. By route "shm" the reader maps `shared`; by the others it reads through `agent`, whose `metadata` is
    empty when it knows it. `publisher` names this publisher's life; `layout` is null when the reader knows it.
    """

    publisher: str
    route: str
    memory: str
    why: str
    address: int
    nbytes: int
    device: int
    sequence: int
    checksums: tuple[int, ...]
    agent: str
    metadata: bytes
    layout: ShardLayout | None
    shared: SharedSlot | None


class ReadRefused(WeightMessage):
    """Publisher -> reader: not now, or never (`final`); `cause` is one sentence that names what is held instead."""

    cause: str
    final: bool = False


class CloseRead(WeightMessage):
    """Reader -> publisher: done with it, well or badly."""


ToPublisher = OpenRead | CloseRead
FromPublisher = ReadGranted | ReadRefused


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """The json beside a payload file of the filesystem channel, written last: where it stands, the payload is whole."""

    version: int
    incarnation: int
    checksums: tuple[int, ...]
    layout: ShardLayout
