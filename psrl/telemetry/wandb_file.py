"""Reads back what an offline W&B run holds: after a logger that was killed, its files tell what is missing.

A `.wandb` file is a 7-byte header and then blocks of 32 KiB with pieces of records: crc32 (u32), length (u16), kind (u8),
bytes, little-endian; kinds: 1 a whole record, 2 the first piece, 3 one between, 4 the last. The records are W&B's protobufs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

FILE_HEADER = 7
BLOCK = 32768
PIECE = struct.Struct("<IHB")
WHOLE, FIRST, BETWEEN, LAST = 1, 2, 3, 4


def highest_step(directory: Path, run_id: str) -> int:
    """The highest step in the offline files of a run below `directory` (`.../wandb`); 0 if there is none."""
    return max(
        (step for path in directory.glob(f"offline-run-*/run-{run_id}.wandb") for step in history_steps(path)),
        default=0,
    )


def history_steps(path: Path) -> Iterator[int]:
    """Steps of the history rows that reached the file; what a killed writer left unfinished is skipped."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    for data in records(path.read_bytes()):
        try:
            record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
        except DecodeError:
            continue
        for item in record.history.item:
            if item.key == "_step" or list(item.nested_key) == ["_step"]:
                yield int(json.loads(item.value_json))


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file that are whole."""
    offset, parts = FILE_HEADER, b""
    while offset + PIECE.size <= len(data):
        left = BLOCK - offset % BLOCK
        if left < PIECE.size:  # too little for a piece: filled up
            offset += left
            continue
        _, length, kind = PIECE.unpack_from(data, offset)
        piece = data[offset + PIECE.size : offset + PIECE.size + length]
        if kind not in (WHOLE, FIRST, BETWEEN, LAST) or len(piece) < length:
            return
        offset += PIECE.size + length
        parts = piece if kind in (WHOLE, FIRST) else parts + piece
        if kind in (WHOLE, LAST):
            yield parts
