"""Slurm's compressed lists of node names. Pure, except that an empty list is this host."""

from __future__ import annotations

import re
import socket
from itertools import product

_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_NAME = rf"(?:[\w.-]|{_RANGES})+"
_LIST = re.compile(rf"{_NAME}(?:,{_NAME})*", re.ASCII)
_NAMES = re.compile(_NAME, re.ASCII)
_PIECES = re.compile(r"\[[^]]*\]|[^[]+")


def expand(text: str) -> list[str]:
    """Names in the list's order, leading zeros kept; the first is the rendezvous host. "" is this host.

    >>> expand("r[1-2]n[09-10],b2")
    ['r1n09', 'r1n10', 'r2n09', 'r2n10', 'b2']

    Raises ValueError, one sentence, for what Slurm would not write.
    """
    if not text:
        return [socket.gethostname()]
    if not _LIST.fullmatch(text):
        raise ValueError(
            f"node list {text!r} cannot be read: give names separated by commas, with numbers in closed brackets as in a[1-3,07],b2."
        )
    return [
        "".join(parts)
        for name in _NAMES.findall(text)
        for parts in product(*(_alternatives(piece, text) for piece in _PIECES.findall(name)))
    ]


def _alternatives(piece: str, text: str) -> list[str]:
    """What one piece of a name stands for: itself, or each number of a bracket."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for part in piece[1:-1].split(","):
        low, _, high = part.partition("-")
        if int(high or low) < int(low):
            raise ValueError(
                f"node list {text!r} cannot be read: {part} runs backwards, write the smaller number first."
            )
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return numbers
