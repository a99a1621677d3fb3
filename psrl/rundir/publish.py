"""Immutable publication: a name appears once, whole, and is never replaced; a reader can tell a torn copy."""

from __future__ import annotations

import errno
import os
import secrets
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from psrl.rundir.retry import DEADLINE_S, TornError, retry

_HEADER = struct.Struct("<4sQI")
_MAGIC = b"psr1"
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


def frame(payload: bytes) -> bytes:
    """Payload behind a header of magic, length (u64) and crc32 (u32), little-endian: 16 bytes more."""
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def unframe(data: bytes) -> bytes:
    """The payload of `frame`. Raises TornError for a short, overlong or altered copy."""
    if len(data) < _HEADER.size:
        raise TornError(f"{len(data)} bytes are too few for a header")
    magic, length, crc = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]
    if magic != _MAGIC:
        raise TornError("it is not a published file")
    if len(payload) != length:
        raise TornError(f"{len(payload)} of {length} bytes are there")
    if zlib.crc32(payload) != crc:
        raise TornError("its checksum is wrong")
    return payload


def publish(path: Path, payload: bytes) -> None:
    """Make `path` appear with the framed payload, on disk when this returns. Mode 0600.

    Raises FileExistsError if the name exists: published names are never replaced.
    """
    data = frame(payload)
    temporary = _write_temporary(path, data)
    try:
        _link_once(temporary, path, data)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def read_published(
    path: Path, deadline_s: float = DEADLINE_S, gone: Callable[[], str | None] | None = None
) -> bytes:  # fmt: skip
    """The payload published at `path`; a missing, short or damaged copy is read again until the deadline.

    `gone` returns a cause once the writer is known to be dead and ends the wait early. Raises UnreadableError.
    """
    return retry(lambda: unframe(path.read_bytes()), str(path), deadline_s, gone)


def write_atomic(path: Path, data: bytes) -> None:
    """Write or replace a plain file in one step, for files with one writer that other tools read (JSON, HTML)."""
    temporary = _write_temporary(path, data)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a few network filesystems cannot sync a directory and need not
            raise
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything; a single `os.write` may stop short on a network filesystem."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        _write_new(temporary, data)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _link_once(temporary: Path, path: Path, data: bytes) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS may repeat a link whose answer was lost and then report our own success as "exists".
        if temporary.stat().st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _write_new(path, data)  # readers see the name early here, but the frame tells them to wait
