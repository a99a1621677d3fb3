"""Sealed samples: append-only segments, one fdatasync for many samples, each reference checked by its crc32."""

from __future__ import annotations

import os
import re
import secrets
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from psrl.rundir.publish import sync_directory, write_all
from psrl.rundir.retry import DEADLINE_S, TornError, retry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*-[0-9a-f]{12}-\d{6,}")
_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class SegmentWriter:
    """Appends payloads to this writer's current segment; only it ever writes there.

    A reference may be handed out only after the `sync` that follows its `append`. If a write or a sync fails, the
    segment is abandoned (what was appended since the last good sync counts as lost: the kernel may have dropped it),
    the error rises, and the next append opens a fresh segment.
    """

    def __init__(self, samples_dir: Path, writer_name: str) -> None:
        if not _WRITER.fullmatch(writer_name):
            raise ValueError(f"writer name {writer_name!r} may hold letters, digits, '-' and '_' only")
        self._dir = samples_dir
        # The nonce keeps a restarted writer of the same name away from the segments of its former life.
        self.prefix = f"{writer_name}-{secrets.token_hex(6)}"
        self._sequence = 0
        self._descriptor: int | None = None
        self._segment = ""
        self._size = 0
        self._name_synced = False
        self._dirty = False

    @property
    def segment(self) -> str | None:
        """Name of the open segment, None before the first append and after `rotate`."""
        return self._segment if self._descriptor is not None else None

    def append(self, payload: bytes) -> tuple[str, int, int, int]:
        """Append one payload. Returns its (segment, offset, length, crc32); not durable before `sync`."""
        if not payload:
            raise ValueError("an empty payload cannot be sealed")
        descriptor = self._open() if self._descriptor is None else self._descriptor
        offset = self._size
        try:
            write_all(descriptor, payload)
        except OSError:
            self._abandon()
            raise
        self._size += len(payload)
        self._dirty = True
        return self._segment, offset, len(payload), zlib.crc32(payload)

    def sync(self) -> None:
        """Make everything appended so far durable: one fdatasync (and once a segment, its name)."""
        if self._descriptor is None or not self._dirty:
            return
        try:
            os.fdatasync(self._descriptor)
            if not self._name_synced:
                sync_directory(self._dir)
        except OSError:
            self._abandon()
            raise
        self._name_synced = True
        self._dirty = False

    def rotate(self) -> None:
        """Sync and seal the open segment; the next append opens a new one. No segment is ever left empty."""
        self.sync()
        self._abandon()

    def close(self) -> None:
        self.rotate()

    def _open(self) -> int:
        name = f"{self.prefix}-{self._sequence:06d}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._descriptor = os.open(self._dir / name, flags, 0o600)
        self._sequence += 1
        self._segment, self._size, self._name_synced = name, 0, False
        return self._descriptor

    def _abandon(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._dirty = False


def read_sample(
    samples_dir: Path,
    segment: str,
    offset: int,
    length: int,
    crc: int,
    deadline_s: float = DEADLINE_S,
    gone: Callable[[], str | None] | None = None,
) -> bytes:
    """The payload behind a reference, verified. Missing, short or stale copies are read again until the deadline.

    Raises ValueError for a name that no writer makes (references come over the wire), UnreadableError otherwise.
    """
    path = samples_dir / _checked(segment)

    def read() -> bytes:
        # Opened anew each time: opening is what makes a network filesystem ask its server for the file's present size.
        with path.open("rb", buffering=0) as file:
            payload = os.pread(file.fileno(), length, offset)
        if len(payload) != length:
            raise TornError(f"{len(payload)} of {length} bytes are there")
        if zlib.crc32(payload) != crc:
            raise TornError("its checksum is wrong")
        return payload

    return retry(read, f"sample {segment}[{offset}:{offset + length}]", deadline_s, gone)


def list_segments(samples_dir: Path) -> list[str]:
    """Names of all segments, sorted."""
    return sorted(entry.name for entry in samples_dir.iterdir() if _NAME.fullmatch(entry.name))


def removable_segments(segments: Iterable[str], needed: Collection[str], writing: Collection[str]) -> list[str]:
    """Segments that no kept sample lies in (`needed`) and that nobody may still append to (`writing`)."""
    return [name for name in segments if name not in needed and name not in writing]


def delete_segments(samples_dir: Path, segments: Iterable[str]) -> int:
    """Delete these segments; returns how many were there. One that is gone already is fine."""
    deleted = 0
    for name in segments:
        try:
            (samples_dir / _checked(name)).unlink()
            deleted += 1
        except FileNotFoundError:
            pass
    return deleted


def _checked(segment: str) -> str:
    if not _NAME.fullmatch(segment):
        raise ValueError(f"{segment!r} is not the name of a sample segment")
    return segment
