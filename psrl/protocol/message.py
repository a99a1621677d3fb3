"""What all control messages have in common."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, kw_only=True, tag=True):
    """Base of every control message; the tag is the class name."""
