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
    """Put `header` in front of the uint8 tensor `slot`; on return it is there, on a device too."""
    packed = bytearray(HEADER_BYTES)
    _FORMAT.pack_into(packed, 0, _MAGIC, header.version, header.incarnation, header.sequence, header.checksum)
    slot[:HEADER_BYTES].copy_(torch.frombuffer(packed, dtype=torch.uint8))
    if slot.is_cuda:
        torch.cuda.current_stream(slot.device).synchronize()


def read_header(buffer: torch.Tensor) -> SlotHeader | None:
    """The header at the start of the uint8 tensor `buffer`, None if there is none."""
    packed = buffer[:HEADER_BYTES].cpu().numpy().data
    magic, version, incarnation, sequence, checksum = _FORMAT.unpack_from(packed)
    if magic != _MAGIC:
        return None
    return SlotHeader(version=version, incarnation=incarnation, sequence=sequence, checksum=checksum)
