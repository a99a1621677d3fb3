"""The state behind psrl.staleness, how a record changes it, and what readers may ask. Decisions are in staleness.py.

Buffer b holds the groups that weights b train on, and gives version b + 1. v is the newest version. A group is RESERVED
while it is made (not tied to one buffer), OCCUPIED once finished and placed, TAKEN once cut into a batch or chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Self

from psrl.coordinator.entry import Entry, StalenessViolation
from psrl.coordinator.records import (
    DROPPED,
    AnyRecord,
    Checkpoint,
    End,
    Epoch,
    Occupy,
    Publish,
    Release,
    Reserve,
    ShortBuffer,
    Start,
    Take,
)


class StalenessState:
    """`buffer_entries` groups train in each step; up to `redundant_entries` >= buffer_entries are made for it.

    `total_steps`: training steps of the run, None while unknown. `keep_checkpoints`: how many of the newest complete
    checkpoints a trainer may start from; the groups trained since the oldest of them are kept.
    """

    __slots__ = (
        "_checkpoints",
        "_due",
        "_entries",
        "_open",
        "_protected",
        "_short",
        "buffer_entries",
        "final",
        "incarnation",
        "keep_checkpoints",
        "lo",
        "next_group",
        "redundant_entries",
        "released",
        "staleness",
        "start_nonce",
        "taken",
        "total_steps",
        "version",
    )

    def __init__(
        self,
        *,
        buffer_entries: int,
        staleness: int,
        redundant_entries: int | None = None,
        total_steps: int | None = None,
        keep_checkpoints: int = 1,
    ) -> None:
        redundant = buffer_entries if redundant_entries is None else redundant_entries
        for name, value, least in (
            ("buffer_entries", buffer_entries, 1),
            ("staleness", staleness, 0),
            ("redundant_entries", redundant, buffer_entries),
            ("keep_checkpoints", keep_checkpoints, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        self.buffer_entries = buffer_entries
        self.staleness = staleness
        self.redundant_entries = redundant
        self.total_steps = total_steps
        self.keep_checkpoints = keep_checkpoints

        self.incarnation = -1
        """Counts trainer starts; -1 before the first."""
        self.start_nonce = ""
        self.version = 0
        """v, the newest published version; buffer v is the one to train."""
        self.taken = 0
        """Groups of buffer v that were cut, a prefix of it; older buffers are taken whole."""
        self.lo = 0
        """First buffer that accepts groups: v, or v + 1 once all of buffer v is taken."""
        self.final = 0
        """Buffers below it are covered by a checkpoint for good, and forgotten."""
        self.next_group = 0
        self.released: Counter[str] = Counter()
        """Groups released so far, by reason."""
        self._checkpoints = [0]
        self._open: dict[int, Reserve] = {}
        self._due: dict[int, int] = {}  # open reservations by deadline, the last buffer each may land in
        self._protected: dict[int, int] = {}  # those of them that may not be aborted as redundant
        self._entries: dict[int, list[Entry]] = {}
        self._short: ShortBuffer | None = None

    # ---- the window ------------------------------------------------------------------------------------------

    @property
    def last_buffer(self) -> int | None:
        """The last buffer that will be trained, None while unknown."""
        last = None if self.total_steps is None else self.total_steps - 1
        if self._short is not None:
            end = self._short.buffer if self._short.size else self._short.buffer - 1
            last = end if last is None else min(last, end)
        return last

    def capacity(self, buffer: int) -> int:
        """Groups that `buffer` is trained with: all alike, but for a short last one."""
        if self._short is not None and self._short.buffer == buffer:
            return self._short.size
        return self.buffer_entries

    def filled(self, buffer: int) -> int:
        """Groups in `buffer`, occupied or taken."""
        return len(self._entries.get(buffer, ()))

    def _room_with(self, buffer: int, filled: int) -> int:
        return self.redundant_entries - filled if filled < self.capacity(buffer) else 0

    def window(self) -> tuple[list[int], list[int]]:
        """`room` and `due` (see window.py) from lo to the last buffer open to the newest version. Deadlines past the
        last step count as the last step."""
        top, last = self.version + self.staleness, self.last_buffer
        if last is not None and last < top:
            top = last
        room = [self._room_with(b, self.filled(b)) for b in range(self.lo, top + 1)]
        return room, self._by_deadline(self._due, len(room))

    def protected_window(self, length: int) -> tuple[list[int], list[int]]:
        """Of the same buffers: places that train and are free, and the protected reservations by deadline."""
        places = [self.capacity(b) - self.filled(b) for b in range(self.lo, self.lo + length)]
        return places, self._by_deadline(self._protected, length)

    def _by_deadline(self, counts: Mapping[int, int], length: int) -> list[int]:
        due = [counts.get(b, 0) for b in range(self.lo, self.lo + length - 1)]
        return [*due, sum(counts.values()) - sum(due)] if length else due

    # ---- the only mutator ------------------------------------------------------------------------------------

    def apply(self, record: AnyRecord) -> None:
        """Change the state as `record` says. Raises StalenessViolation, with the state unchanged, if it cannot be."""
        self._APPLY[type(record)](self, record)

    def _apply_reserve(self, record: Reserve) -> None:
        deadline = record.version + self.staleness
        if record.group != self.next_group or not 0 <= record.version <= self.version or deadline < self.lo:
            raise StalenessViolation(f"{record} cannot be admitted: {self.describe()}")
        self.next_group += 1
        self._open[record.group] = record
        self._due[deadline] = self._due.get(deadline, 0) + 1
        if record.protected:
            self._protected[deadline] = self._protected.get(deadline, 0) + 1

    def _close(self, group: int) -> None:
        reservation = self._open.pop(group)
        deadline = reservation.version + self.staleness
        for counts in (self._due, self._protected) if reservation.protected else (self._due,):
            counts[deadline] -= 1
            if not counts[deadline]:
                del counts[deadline]

    def _apply_occupy(self, record: Occupy) -> None:
        group, buffer = record.group, record.buffer
        reservation = self._open.get(group)
        if reservation is None:
            raise StalenessViolation(f"group {group} occupies buffer {buffer} but is not open")
        in_window = self.lo <= buffer <= reservation.version + self.staleness
        if not in_window or self.filled(buffer) >= self.capacity(buffer):
            raise StalenessViolation(
                f"group {group} of version {reservation.version} may not enter buffer {buffer}: {self.describe()}"
            )
        self._close(group)
        entry = Entry(
            group,
            reservation.data_epoch,
            reservation.prompt,
            reservation.version,
            record.ref,
            record.reward_mean,
            record.response_tokens,
        )
        self._entries.setdefault(buffer, []).append(entry)

    def _apply_release(self, record: Release) -> None:
        if record.group in self._open:
            self._close(record.group)
        else:
            at = self._find_untaken(record.group)
            if at is None or record.outcome != DROPPED:
                raise StalenessViolation(f"{record}, but that group is neither in flight nor sealed and to be dropped")
            del self._entries[at[0]][at[1]]
        self.released[record.reason] += 1

    def _apply_take(self, record: Take) -> None:
        buffer = record.buffer
        end = self.taken + len(record.groups)
        chunk = self._entries.get(buffer, [])[self.taken : end]
        if buffer != self.version or not chunk or [entry.group for entry in chunk] != record.groups:
            raise StalenessViolation(f"groups {record.groups} are not the next of buffer {buffer}: {self.describe()}")
        for entry in chunk:
            if entry.version + self.staleness < buffer:
                raise StalenessViolation(
                    f"group {entry.group} of version {entry.version} is older than psrl.staleness={self.staleness} "
                    f"allows in buffer {buffer}"
                )
        all_taken = end >= self.capacity(buffer)
        if all_taken and self._due.get(buffer):
            raise StalenessViolation(f"buffer {buffer} is taken while reservations are due by it: {self.describe()}")
        self.taken = end
        if all_taken:
            self.lo = buffer + 1

    def _apply_publish(self, record: Publish) -> None:
        self._check_publish(record.version)
        self.version = record.version
        self.taken = 0

    def _check_publish(self, version: int) -> None:
        if version != self.version + 1 or self.lo != version:
            raise StalenessViolation(f"version {version} is published before its buffer was taken: {self.describe()}")

    def _apply_checkpoint(self, record: Checkpoint) -> None:
        if not self._checkpoints[-1] < record.version <= self.version:
            raise StalenessViolation(f"the checkpoint at {record.version} is not of this history: {self.describe()}")
        self._note_checkpoint(record.version)

    def _note_checkpoint(self, version: int) -> None:
        self._checkpoints = [*self._checkpoints, version][-self.keep_checkpoints :]
        if len(self._checkpoints) == self.keep_checkpoints:
            self.final = max(self.final, self._checkpoints[0])
        for buffer in [b for b in self._entries if b < self.final]:
            del self._entries[buffer]

    def _check_start(self, version: int) -> None:
        # lo rather than v: the trainer may have checkpointed v + 1 just before its publication could be noted here.
        if not self.final <= version <= self.lo:
            raise StalenessViolation(
                f"a trainer starts at version {version}, but the ledger can resume from {self.final} to {self.lo}: "
                "the checkpoint is older than the groups that were kept, or of another run"
            )

    def _apply_start(self, record: Start) -> None:
        """Reopen the buffers from the checkpoint on. V of their groups falls to its version, the newest weights that
        this incarnation knows, but never below what their buffer asks for: no finished group is lost to the bound."""
        start = record.version
        self._check_start(start)
        if record.incarnation != self.incarnation + 1 or self._open:
            raise StalenessViolation(f"{record} with groups in flight or out of order: {self.describe()}")
        self.incarnation = record.incarnation
        self.start_nonce = record.start_nonce
        self.version = self.lo = start
        self.taken = 0
        for buffer, entries in self._entries.items():
            if buffer >= start:
                entries[:] = [entry.lowered(max(start, buffer - self.staleness)) for entry in entries]
        self._checkpoints = [version for version in self._checkpoints if version < start]
        self._note_checkpoint(start)

    def _apply_short_buffer(self, record: ShortBuffer) -> None:
        packed = self._begun() + self._untaken()
        if self._open or record != self._end_with(len(packed)):
            raise StalenessViolation(f"{record} with groups in flight or of another size: {self.describe()}")
        for buffer in [b for b in self._entries if b >= self.lo]:
            del self._entries[buffer]
        for i in range(0, len(packed), self.buffer_entries):
            buffer = self.lo + i // self.buffer_entries
            # Moving to an earlier buffer never breaks the bound, and no group is newer than the weights it trains.
            self._entries[buffer] = [entry.lowered(buffer) for entry in packed[i : i + self.buffer_entries]]
        self._short = record
        if self.lo == self.version and self.taken and self.taken >= self.capacity(self.version):
            self.lo = self.version + 1

    def _end_with(self, groups: int) -> ShortBuffer:
        """The last buffer if `groups` groups, packed from lo on, are all that is left."""
        if not groups and self.lo:
            return ShortBuffer(self.lo - 1, self.capacity(self.lo - 1))
        full_before = max(0, groups - 1) // self.buffer_entries
        return ShortBuffer(self.lo + full_before, groups - full_before * self.buffer_entries)

    _APPLY: ClassVar[dict[type, Callable[..., None]]] = {
        Reserve: _apply_reserve,
        Occupy: _apply_occupy,
        Release: _apply_release,
        Take: _apply_take,
        Publish: _apply_publish,
        Checkpoint: _apply_checkpoint,
        Start: _apply_start,
        ShortBuffer: _apply_short_buffer,
        Epoch: lambda self, record: None,
        End: lambda self, record: None,
    }

    # ---- for readers -----------------------------------------------------------------------------------------

    def _begun(self) -> list[Entry]:
        """Groups cut from a buffer that is not cut whole."""
        return self._entries.get(self.version, [])[: self.taken] if self.lo == self.version else []

    def _untaken(self) -> list[Entry]:
        """Finished groups not yet cut, in batch order."""
        entries: list[Entry] = []
        for buffer in sorted(b for b in self._entries if b >= self.version):
            entries += self._entries[buffer][self.taken if buffer == self.version else 0 :]
        return entries

    def _find_untaken(self, group: int) -> tuple[int, int] | None:
        """(buffer, index) of a sealed group that is not taken. Linear: for rare events."""
        for buffer, entries in self._entries.items():
            first = 0 if buffer > self.version else self.taken if buffer == self.version else len(entries)
            for index in range(first, len(entries)):
                if entries[index].group == group:
                    return buffer, index
        return None

    @property
    def num_open(self) -> int:
        """Groups in flight."""
        return len(self._open)

    def is_open(self, group: int) -> bool:
        return group in self._open

    def open_groups(self) -> Iterable[Reserve]:
        """Reservations of the groups in flight, oldest first."""
        return self._open.values()

    def oldest_version(self) -> int | None:
        """Lowest V in flight."""
        return min(self._due) - self.staleness if self._due else None

    def entries(self, buffer: int) -> list[Entry]:
        """Groups of a buffer in batch order, taken ones first; empty if it is consumed for good."""
        return list(self._entries.get(buffer, ()))

    def taken_groups(self, buffer: int) -> list[Entry]:
        """The groups of a buffer that were cut, in batch order: what a trainer gets, also when it asks again."""
        entries = self.entries(buffer)
        return entries if buffer < self.version else entries[: self.taken] if buffer == self.version else []

    def is_taken(self, buffer: int) -> bool:
        """The whole buffer was cut."""
        return buffer < self.lo

    def lags(self, buffer: int) -> list[int]:
        """Versions that each group of the buffer lags behind the weights it trains."""
        return [buffer - entry.version for entry in self._entries.get(buffer, ())]

    def ready(self, buffer: int) -> bool:
        """All groups of the buffer are there."""
        return 0 < self.capacity(buffer) <= self.filled(buffer)

    def data_ended(self, buffer: int) -> bool:
        """The run has no such buffer: all steps are done, or the data is used up."""
        last = self.last_buffer
        return last is not None and buffer > last

    def describe(self) -> str:
        """One line for error messages and logs."""
        filled = {b: len(entries) for b, entries in sorted(self._entries.items()) if b >= self.version}
        return (
            f"version {self.version}, first open buffer {self.lo}, groups per buffer {filled}, {self.taken} taken, "
            f"{len(self._open)} in flight, due {dict(sorted(self._due.items()))}"
        )

    def copy(self) -> Self:
        """An independent state: what would follow if."""
        twin = object.__new__(type(self))
        for name in StalenessState.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.released = Counter(self.released)
        twin._checkpoints = list(self._checkpoints)
        twin._open = dict(self._open)
        twin._due = dict(self._due)
        twin._protected = dict(self._protected)
        twin._entries = {buffer: list(entries) for buffer, entries in self._entries.items()}
        return twin

    def snapshot(self) -> dict[str, object]:
        """The whole state, for comparison: equal snapshots behave alike for ever."""
        twin = self.copy()
        state: dict[str, object] = {name: getattr(twin, name) for name in StalenessState.__slots__}
        state["_entries"] = {buffer: entries for buffer, entries in sorted(twin._entries.items()) if entries}
        return state
