"""A finished group in its buffer, and what is raised when the rules about such groups are broken."""

from __future__ import annotations

import msgspec

from psrl.protocol.samples import SampleRef


class StalenessViolation(RuntimeError):  # noqa: N818 - names what happened, not a class of bad input
    """An invariant does not hold: a bug, or records that no coordinator wrote in this order. Never go on after it."""


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A finished group in its buffer. `version` is its V, the one that the bound is about."""

    group: int
    data_epoch: int
    prompt: int
    version: int
    ref: SampleRef
    reward_mean: float
    response_tokens: int

    def lowered(self, version: int) -> Entry:
        """The same with V no higher than `version`."""
        return self if self.version <= version else msgspec.structs.replace(self, version=version)
