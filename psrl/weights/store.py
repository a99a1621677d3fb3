"""Which of a publisher's two slots holds which version, and who reads it: pure bookkeeping, time is passed in.

The newest whole version always stays readable while the next one is written into the other slot. That other slot may
still have readers of the version before; they are waited for, and after a deadline the slot is taken from them. Each
write changes the slot's sequence number twice (odd: being written), so a reader that compares it afterwards knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class SlotState(Enum):
    EMPTY = "empty"
    WRITING = "writing"
    READY = "ready"


class VersionNotHeldError(LookupError):
    """The version asked for is in no slot; the text says which ones are."""


@dataclass(slots=True)
class Slot:
    index: int
    state: SlotState = SlotState.EMPTY
    version: int = -1
    incarnation: int = -1
    sequence: int = 0
    checksums: tuple[int, ...] = ()
    readers: dict[str, float] = field(default_factory=dict)
    """Reader -> time at which its lease ends."""

    @property
    def age(self) -> tuple[int, int]:
        """Orders versions: a new incarnation comes after every version of the older one."""
        return self.incarnation, self.version


class SlotTable:
    """Two slots, one writer, any number of readers. Not thread-safe: the publisher holds its lock around each call."""

    def __init__(self) -> None:
        self.slots = (Slot(0), Slot(1))
        self.revoked: dict[str, float] = {}
        """Readers that lost their slot and have not left yet (-> end of lease): they still need progress to notice."""

    @property
    def newest(self) -> Slot | None:
        ready = [slot for slot in self.slots if slot.state is SlotState.READY]
        return max(ready, key=lambda slot: slot.age, default=None)

    def target(self) -> Slot:
        """The slot that the next version goes to: never the newest one."""
        newest = self.newest
        return self.slots[0] if newest is None else self.slots[1 - newest.index]

    def begin_write(self, version: int, incarnation: int) -> tuple[Slot, tuple[str, ...]]:
        """Take the target slot for writing; returns it and the readers that it is taken from.

        The caller waits first until `target().readers` is empty or its patience is over. ValueError if the version is
        not newer than the newest one, RuntimeError while another write is going on."""
        newest = self.newest
        if any(slot.state is SlotState.WRITING for slot in self.slots):
            raise RuntimeError(f"version {version} cannot be written while another version is being written")
        if newest is not None and (incarnation, version) <= newest.age:
            raise ValueError(
                f"version {version} of incarnation {incarnation} is not newer than the published version "
                f"{newest.version} of incarnation {newest.incarnation}"
            )
        slot = self.target()
        revoked = tuple(slot.readers)
        self.revoked.update(slot.readers)
        slot.readers.clear()
        slot.state, slot.version, slot.incarnation = SlotState.WRITING, version, incarnation
        slot.sequence += 1
        return slot, revoked

    def finish_write(self, slot: Slot, checksums: tuple[int, ...]) -> None:
        """The version in `slot` is whole: from now on it is the newest."""
        slot.state, slot.checksums = SlotState.READY, checksums
        slot.sequence += 1

    def abandon_write(self, slot: Slot) -> None:
        """The write failed: the slot holds nothing."""
        slot.state, slot.version, slot.incarnation = SlotState.EMPTY, -1, -1
        slot.sequence += 1

    def open(self, version: int, incarnation: int, reader: str, lease_end_s: float) -> Slot:
        """Pin the slot of this version for `reader` until `lease_end_s`; a reader has one slot at a time.
        VersionNotHeldError if no slot holds it whole."""
        for slot in self.slots:
            if slot.state is SlotState.READY and slot.age == (incarnation, version):
                self.close(reader)
                slot.readers[reader] = lease_end_s
                return slot
        held = ", ".join(
            f"{slot.version} of incarnation {slot.incarnation}"
            for slot in sorted(self.slots, key=lambda slot: slot.age)
            if slot.state is SlotState.READY
        )
        raise VersionNotHeldError(
            f"version {version} of incarnation {incarnation} is not held here (held: {held or 'none'})"
        )

    def close(self, reader: str) -> None:
        """Unpin; a reader that is unknown (expired, revoked) is fine."""
        for leases in self._leases():
            leases.pop(reader, None)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Unpin the readers whose lease is over; returns them."""
        gone = tuple(reader for leases in self._leases() for reader, end in leases.items() if end <= now_s)
        for reader in gone:
            self.close(reader)
        return gone

    def num_readers(self) -> int:
        """Readers that have neither left nor expired, those without a slot included."""
        return sum(map(len, self._leases()))

    def _leases(self) -> tuple[dict[str, float], ...]:
        return self.slots[0].readers, self.slots[1].readers, self.revoked
