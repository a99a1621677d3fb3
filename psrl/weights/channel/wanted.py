"""What a pull wants of one trainer rank, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.protocol.weights import ReadGranted
from psrl.weights.channel.nixl_source import Source
from psrl.weights.channel.slot_header import SlotHeader
from psrl.weights.route import HOST


@dataclass(frozen=True, slots=True)
class Wanted:
    """The version of trainer rank `rank`. `header`: what its slot begins with as long as it holds the version whole, also where
    `source` is not the trainer itself but a node that passes the version on."""

    rank: int
    source: Source
    grant: ReadGranted
    header: SlotHeader

    @property
    def by_store(self) -> bool:
        """It is fetched over the network into host memory, once for all instances of this node."""
        return self.grant.route == "nixl" and self.grant.memory == HOST
