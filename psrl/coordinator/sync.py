"""When an instance pulls new weights: pure decisions. Event-driven, so a decision is made on every change."""

from __future__ import annotations

from collections.abc import Iterable

from psrl.coordinator.views import InstanceView


def greedy_pulls(
    instances: Iterable[InstanceView], *, version: int, incarnation: int, now_s: float
) -> list[InstanceView]:
    """Instances that shall pull `version` now: every one that is behind, or holds weights of an older incarnation,
    and neither leaves, nor pulls already, nor is in quarantine after a failed pull."""
    return [
        i
        for i in instances
        if not i.leaving
        and i.pulling < 0
        and now_s >= i.quarantined_until_s
        and (i.incarnation != incarnation or i.version < version)
    ]
