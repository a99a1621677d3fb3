"""The journal on disk: append-only segments, one a coordinator start, in `<run_dir>/ledger/<epoch>-<nonce>`.

A segment is a sequence of frames; a frame is length and crc32 (little-endian uint32 each) and a msgpack list of records
that count together or not at all. The first record is an `Epoch`: it says of each older segment how many bytes count.
Whatever an older coordinator that is not dead yet writes after that is fenced off. Nothing is ever rewritten.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from psrl.coordinator.records import AnyRecord, Epoch

_HEADER = struct.Struct("<II")
_MAX_FRAME_BYTES = 1 << 28  # a longer one can only be a damaged header
_READ_BUFFER_BYTES = 1 << 20
_CLAIM_ATTEMPTS = 8

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyRecord])


class LedgerError(RuntimeError):
    """The journal cannot be written, or bytes that counted before can no longer be read."""


class LedgerFenced(LedgerError):  # noqa: N818 - names what happened
    """A newer coordinator start has taken over: this one must end without touching anything."""


class SegmentName(NamedTuple):
    """Orders segments: by epoch; of two starts that chose the same one at the same moment, the larger nonce wins."""

    epoch: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.epoch:08d}-{self.nonce}"


def segments(directory: Path) -> list[SegmentName]:
    """Names of the segments there, in order; other files are ignored."""
    names = []
    for path in directory.iterdir() if directory.is_dir() else ():
        epoch, dash, nonce = path.name.partition("-")
        if dash and nonce and epoch.isdecimal() and str(SegmentName(int(epoch), nonce)) == path.name:
            names.append(SegmentName(int(epoch), nonce))
    return sorted(names)


def _frames(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(end offset, payload) of each whole frame; ends at a torn one."""
    end = 0
    while True:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return
        length, crc = _HEADER.unpack(header)
        if length > _MAX_FRAME_BYTES:
            return
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != crc:
            return
        end += _HEADER.size + length
        yield end, payload


def _read(path: Path, until: int | None) -> Iterator[AnyRecord]:
    """Records of a segment: all whole frames, or exactly `until` bytes of them."""
    end = 0
    if until != 0:
        with path.open("rb", buffering=_READ_BUFFER_BYTES) as file:
            for end, payload in _frames(file):
                yield from _decoder.decode(payload)
                if end == until:
                    return
    if until is not None and end != until:
        raise LedgerError(
            f"{path} holds {end} readable bytes where {until} were counted: the file is damaged or not visible here yet"
        )


def _newest(directory: Path) -> tuple[SegmentName, Epoch] | None:
    """The newest segment whose epoch record is complete; a start that died before that never was."""
    for name in reversed(segments(directory)):
        with (directory / str(name)).open("rb") as file:
            for _, payload in _frames(file):
                first = _decoder.decode(payload)[0]
                if not isinstance(first, Epoch):
                    raise LedgerError(f"{directory / str(name)} begins with {type(first).__name__} instead of Epoch")
                return name, first
    return None


def _history(directory: Path) -> list[tuple[str, int]]:
    """Segments that count now, oldest first, with the bytes that count of each."""
    newest = _newest(directory)
    if newest is None:
        return []
    name, epoch = newest
    readable = 0
    with (directory / str(name)).open("rb", buffering=_READ_BUFFER_BYTES) as file:
        for end, _ in _frames(file):
            readable = end
    return [*epoch.history, (str(name), readable)]


def _replay(directory: Path, history: Iterable[tuple[str, int]]) -> Iterator[AnyRecord]:
    for name, until in history:
        yield from _read(directory / name, until)


def replay(directory: Path) -> Iterator[AnyRecord]:
    """Every record that counts, in order; nothing if there is no ledger. Raises LedgerError if bytes that a later start
    counted cannot be read (on a network file system, perhaps not yet: try again before giving up)."""
    newest = _newest(directory)
    if newest is not None:
        name, epoch = newest
        yield from _replay(directory, epoch.history)
        yield from _read(directory / str(name), None)


class Ledger:
    """One coordinator start's segment. `append` collects, `flush` makes durable: one write and fdatasync for many."""

    def __init__(self, directory: Path, fd: int, name: SegmentName, history: Sequence[tuple[str, int]]) -> None:
        self.directory = directory
        self.name = name
        self.size = 0
        """Bytes written to the segment."""
        self._history = list(history)
        self._fd = fd
        self._buffer = bytearray()
        self._failure: str | None = None

    @classmethod
    def open(cls, directory: Path, nonce: str | None = None) -> Ledger:
        """Begin a new epoch: every older segment is fenced at what can be read of it now.

        Raises LedgerFenced if another coordinator begins a later epoch at the same moment.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name, fd = _claim(directory, nonce or secrets.token_hex(8))
        try:
            history = _history(directory)
            ledger = cls(directory, fd, name, history)
            ledger.append([Epoch(name.epoch, name.nonce, history)])
            ledger.flush(sync=True)
            _sync_directory(directory)
            ledger.check_newest()
        except BaseException:
            os.close(fd)
            raise
        return ledger

    @property
    def epoch(self) -> int:
        return self.name.epoch

    def history(self) -> Iterator[AnyRecord]:
        """The records that count from before this start, in order."""
        return _replay(self.directory, self._history)

    def append(self, records: Sequence[AnyRecord]) -> None:
        """Add records that belong together; they reach the disk with the next flush, all or none."""
        if not records:
            return
        payload = _encoder.encode(records)
        self._buffer += _HEADER.pack(len(payload), zlib.crc32(payload))
        self._buffer += payload

    def flush(self, sync: bool = True) -> None:
        """Write what was appended; with `sync` wait until it is on disk.

        Raises LedgerError when that fails, and ever after: how much arrived is then unknown, so the only way on is a
        new epoch, which reads what did.
        """
        if self._failure is not None:
            raise LedgerError(f"{self.directory / str(self.name)} failed before: {self._failure}")
        try:
            view = memoryview(self._buffer)
            while view:
                view = view[os.write(self._fd, view) :]
            if sync:
                os.fdatasync(self._fd)
        except OSError as error:
            self._failure = str(error)
            raise LedgerError(f"{self.directory / str(self.name)} cannot be written: {error}") from error
        finally:
            view.release()
        self.size += len(self._buffer)
        self._buffer.clear()

    def check_newest(self) -> None:
        """Raises LedgerFenced if a newer segment exists: one directory listing, for now and then."""
        newest = segments(self.directory)[-1]
        if newest != self.name:
            raise LedgerFenced(
                f"ledger epoch {self.name} is fenced by {newest}: another coordinator runs this directory"
            )

    def close(self) -> None:
        """Close without flushing."""
        os.close(self._fd)


def _claim(directory: Path, nonce: str) -> tuple[SegmentName, int]:
    """Create the next segment, still empty, so that no other start can fall between what is read and what is fenced."""
    for _ in range(_CLAIM_ATTEMPTS):
        known = segments(directory)
        name = SegmentName(known[-1].epoch + 1 if known else 0, nonce)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(directory / str(name), flags, 0o600)
        seen = segments(directory)
        if seen == [*known, name]:
            return name, fd
        os.close(fd)
        if seen[-1] != name:
            raise LedgerFenced(f"ledger epoch {name} is fenced by {seen[-1]}: another coordinator started as well")
        # Another start of the same epoch sorts before this one and may have begun to write: come after it for good.
    raise LedgerError(f"{directory}: other coordinators keep starting; end them, one directory takes one run")


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
