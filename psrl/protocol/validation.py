"""Messages between the coordinator and the validators; see psrl.coordinator.validation."""

from __future__ import annotations

import msgspec

from psrl.protocol.message import Message


class ValidatorState(Message):
    """A validator is there. What it may have in hand is of an order that the coordinator knows, or of none that counts."""


class Validate(Message):
    """Coordinator -> validator: pull this version, answer the prompts `part`, `part + parts`, ... of the validation set
    with it, score them. It takes the place of an order before it."""

    version: int
    incarnation: int
    part: int
    parts: int


class SourceScores(msgspec.Struct, array_like=True, kw_only=True):
    """Sums over the samples of one data source; `failed` ones have no reward, `cut_off` ones used up their budget."""

    samples: int = 0
    failed: int = 0
    reward_sum: float = 0.0
    response_tokens: int = 0
    cut_off: int = 0


class ValidationDone(Message):
    """One validator's part, by data source."""

    version: int
    incarnation: int
    scores: dict[str, SourceScores]


class ValidationFailed(Message):
    version: int
    cause: str
