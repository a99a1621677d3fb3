"""What the coordinator knows of the other roles at this moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.protocol.control import InstanceInfo
from psrl.protocol.generation import EngineStats

UNLIMITED = 1 << 30


@dataclass(slots=True)
class InstanceView:
    """One living rollout instance. `version` is the weights that it is known to serve (-1: none); it only ever grows within
    an incarnation, so a decision made on it is never too new."""

    name: str
    endpoint: str
    max_concurrent: int
    version: int = -1
    incarnation: int = 0
    pulling: int = -1
    """The version being pulled, -1 if none."""
    quarantined_until_s: float = 0.0
    draining: bool = False
    """It switches weights now, or is behind and finishes what it has (partial rollout off): nothing new is routed here."""
    leaving: bool = False
    """It hands back what it has: nothing new is routed here, it pulls no more, and it goes when nothing is here."""
    asleep: bool = False
    """It was told to leave the GPUs to the trainer, and has no weights (see coordinator.turns)."""
    in_flight: int = 0
    """Samples placed here that have not left."""
    fits: int = UNLIMITED
    """Most samples that are placed here. It is what was left after the engine preempted and handed its queue back, and grows
    with each sample that leaves: what the KV cache did not hold must not come straight back."""
    full: bool = False
    """New groups go elsewhere: sessions wait here for room in the KV cache (see coordinator.sessions)."""
    sated: bool = False
    """It has its share of new groups until others have taken new weights, too (see coordinator.shares)."""
    stats: EngineStats = field(default_factory=EngineStats)
    reported_s: float = 0.0
    """When `stats` came, on the coordinator's clock."""
    throughput: float = 0.0
    """Tokens generated a second, of late."""
    counted_from_s: float = 0.0
    """Where `throughput` is measured from next: the engine's clock, and what it had generated then."""
    counted_from_tokens: int = 0
    pause_s: float = 0.0
    """How long decoding stood still at the last pull."""
    placed_tokens: float = 0.0
    """KV tokens that the samples here counted for when they were placed."""
    grown_tokens: float = 0.0
    """What they held beyond that at the last report."""
    noted: dict[str, InstanceView] | None = field(default=None, repr=False, compare=False)
    """Where each change of this view is noted, for indexes that follow it."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if (noted := getattr(self, "noted", None)) is not None and name != "noted":
            noted[self.name] = self

    def info(self, alive: bool = True) -> InstanceInfo:
        return InstanceInfo(name=self.name, endpoint=self.endpoint, alive=alive)


@dataclass(slots=True)
class AgentView:
    """One agent loop and the groups in its hands."""

    name: str
    groups: set[int] = field(default_factory=set)
    leaving: bool = False
    """It gets no new group."""
