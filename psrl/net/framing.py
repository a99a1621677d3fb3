"""What goes over a socket: a small header frame (kind, epoch) and, for a message, one msgpack payload frame."""

from __future__ import annotations

import logging
import struct
from collections import Counter
from typing import Any

import msgspec

MESSAGE, PING, PONG, STALE = 1, 2, 3, 4
"""STALE is a server's answer to a message of another epoch: "say hello again"."""

LARGEST_MESSAGE = 256 * 2**20
"""Bytes. Control messages are a few KiB; whatever is larger than this is refused by the socket itself."""

_HEADER = struct.Struct("<BQ")


class BadFramesError(ValueError):
    """The frames are not of this protocol."""


def pack_header(kind: int, epoch: int) -> bytes:
    return _HEADER.pack(kind, epoch)


def unpack(frames: list[bytes]) -> tuple[int, int, bytes | None]:
    """(kind, epoch, payload) of [header] or [header, payload]. Raises BadFramesError for anything else."""
    if not 1 <= len(frames) <= 2 or len(frames[0]) != _HEADER.size:
        raise BadFramesError(f"{len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes")
    kind, epoch = _HEADER.unpack(frames[0])
    if kind not in (MESSAGE, PING, PONG, STALE) or (kind == MESSAGE) != (len(frames) == 2):
        raise BadFramesError(f"kind {kind} with {len(frames)} frames")
    return kind, epoch, frames[1] if kind == MESSAGE else None


class Codec:
    """msgpack with a type: `Codec(A | B)` decodes nothing but an A or a B. Pickle never."""

    def __init__(self, decode_type: Any) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(decode_type).decode


class Drops:
    """Counts what was dropped, by reason, and logs the 1st, 2nd, 4th, 8th ... of each: hostile input fills no disk."""

    def __init__(self, logger: logging.Logger, owner: str) -> None:
        self.counts: Counter[str] = Counter()
        self._logger = logger
        self._owner = owner

    def note(self, reason: str, detail: str = "") -> None:
        self.counts[reason] += 1
        count = self.counts[reason]
        if count & (count - 1) == 0:
            self._logger.warning("%s: dropped %s (%d so far)%s", self._owner, reason, count, detail and f": {detail}")
