"""The run's tokenised prompts in one immutable file. Everyone refers to a prompt by its index there.

    magic | a msgpack record a prompt | index: N x (offset u64, length u32, crc32 u32) | statistics (msgpack) | footer

The footer locates and checks index and statistics; every record has a checksum of its own, so that opening the file
costs the same for ten prompts and for ten million, and damage is found where it is read.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from psrl.rundir.publish import sync_directory
from psrl.rundir.retry import DEADLINE_S, TornError, retry
from psrl.tasks.base import PreparedPrompt

MAGIC = b"psrlP001"
_ENTRY = struct.Struct("<QII")
_FOOTER = struct.Struct("<QIII8s")  # index offset, prompts, statistics length, crc32 of index + statistics, magic


class PreparedStats(msgspec.Struct, kw_only=True):
    """What became of the task's items. Lengths in tokens; `longest` and `mean_length` are those of the kept prompts."""

    items: int = 0
    kept: int = 0
    skipped_too_long: int = 0
    """Longer than data.max_prompt_length."""
    skipped_no_room: int = 0
    """As long as the context or longer: no token could follow."""
    longest: int = 0
    mean_length: float = 0.0

    @property
    def skipped(self) -> int:
        return self.skipped_too_long + self.skipped_no_room


class PreparedWriter:
    """Writes beside `path`; the name appears, whole and durable, when `finish` returns. Leaving the block without that
    removes what was written."""

    def __init__(self, path: Path):
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        self._encoder = msgspec.msgpack.Encoder()
        self._index = bytearray()
        self._offset = len(MAGIC)

    def __enter__(self) -> PreparedWriter:
        self._file = self._temporary.open("xb")
        self._file.write(MAGIC)
        return self

    def __len__(self) -> int:
        return len(self._index) // _ENTRY.size

    def add(self, prompt: PreparedPrompt) -> None:
        """Raises TypeError for a ground truth or extra info that msgpack cannot hold."""
        record = self._encoder.encode(prompt)
        self._index += _ENTRY.pack(self._offset, len(record), zlib.crc32(record))
        self._offset += self._file.write(record)

    def finish(self, stats: PreparedStats) -> None:
        tail = bytes(self._index) + (statistics := self._encoder.encode(stats))
        self._file.write(tail + _FOOTER.pack(self._offset, len(self), len(statistics), zlib.crc32(tail), MAGIC))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.rename(self._path)
        sync_directory(self._path.parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class PreparedReader:
    """Memory-mapped; `reader[i]` decodes one prompt. Waits by deadline for a file that another node has just written.

    Raises UnreadableError if it is missing or damaged at the deadline.
    """

    def __init__(self, path: Path, deadline_s: float = DEADLINE_S):
        self._path = path
        self._decoder = msgspec.msgpack.Decoder(PreparedPrompt)
        self._data, self._index_at, self._length, self.stats = retry(lambda: _open(path), str(path), deadline_s)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> PreparedPrompt:
        """Raises IndexError beyond the end, ValueError for a record whose checksum is wrong."""
        if not 0 <= index < self._length:
            raise IndexError(f"prompt {index} of {self._length} in {self._path}")
        offset, length, crc = _ENTRY.unpack_from(self._data, self._index_at + index * _ENTRY.size)
        record = self._data[offset : offset + length]
        if zlib.crc32(record) != crc:
            raise ValueError(f"{self._path} is damaged: prompt {index} fails its checksum")
        return self._decoder.decode(record)

    def __iter__(self) -> Iterator[PreparedPrompt]:
        return (self[index] for index in range(self._length))


def write_prepared(path: Path, prompts: Iterable[PreparedPrompt], stats: PreparedStats) -> None:
    """Write all of `prompts` at once."""
    with PreparedWriter(path) as writer:
        for prompt in prompts:
            writer.add(prompt)
        writer.finish(stats)


def _open(path: Path) -> tuple[mmap.mmap, int, int, PreparedStats]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < len(MAGIC) + _FOOTER.size:
            raise TornError(f"{size} bytes are too few")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    index_at, prompts, stats_length, crc, magic = _FOOTER.unpack_from(data, size - _FOOTER.size)
    if magic != MAGIC or data[: len(MAGIC)] != MAGIC:
        raise TornError("it does not begin and end as prepared prompts do")
    tail = data[index_at : size - _FOOTER.size]
    if len(tail) != prompts * _ENTRY.size + stats_length or zlib.crc32(tail) != crc:
        raise TornError("its index fails its checksum")
    return data, index_at, prompts, msgspec.msgpack.decode(tail[len(tail) - stats_length :], type=PreparedStats)
