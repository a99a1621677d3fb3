"""What scoring says of one sample."""

from __future__ import annotations

import msgspec


class ScoreResult(msgspec.Struct, array_like=True):
    """`kind`: ok | invalid (None, NaN, infinite) | error (raised, or its process died) | timeout."""

    reward: float | None
    kind: str
    error: str | None = None
    metrics: dict[str, float] = {}
