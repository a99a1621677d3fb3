"""The first 64 bytes of a slot: what stands behind them, and whether it is whole.

A reader fetches them after the payload. A writer makes the sequence odd before it touches the payload, so an unchanged
header proves that not one byte was overwritten while the payload was on its way.
"""

from __future__ import annotations

import struct

import msgspec
import torch

HEADER_BYTES = 64
_MAGIC = b"psrlwts1"
_FORMAT = struct.Struct("<8sqqQQ")


class SlotHeader(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    incarnation: int
    sequence: int
    """Even: whole. Odd: being written."""
    checksum: int


def write_header(slot: torch.Tensor, header: SlotHeader) -> None:
    """Put `header` in front of the uint8 tensor `slot`."""
    fields = (header.version, header.incarnation, header.sequence, header.checksum)
    _FORMAT.pack_into(slot.numpy().data, 0, _MAGIC, *fields)


def read_header(buffer: torch.Tensor) -> SlotHeader | None:
    """The header at the start of the uint8 tensor `buffer`, None if there is none."""
    magic, version, incarnation, sequence, checksum = _FORMAT.unpack_from(buffer.numpy().data)
    if magic != _MAGIC:
        return None
    return SlotHeader(version=version, incarnation=incarnation, sequence=sequence, checksum=checksum)
