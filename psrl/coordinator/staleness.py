"""The staleness decisions: which group may be made, where a finished one goes, what may train.

A group's version V is that of the instance at which it was reserved; it may train in buffer b only if
V + staleness >= b. Rules and proofs: docs/decisions/0002-staleness-rules.md.

Pure: no I/O, no clock. A decision looks and returns records (None or none: not now); `apply` is the only thing that
changes the state. Live: decide, apply, append to the ledger. After a restart: apply what the ledger holds. Both walk
through the same states.

>>> state = Staleness(buffer_entries=1, staleness=0)
>>> for record in state.start(version=0, start_nonce="a"):
...     state.apply(record)
>>> state.apply(state.reserve(version=0, data_epoch=0, prompt=7, instance="i0"))
>>> state.can_reserve(version=0)  # the only place is promised
False
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psrl.coordinator.entry import Entry, StalenessViolation
from psrl.coordinator.records import (
    DROPPED,
    REASON_END_OF_DATA,
    REASON_REDUNDANT,
    REASON_RESTART,
    REQUEUED,
    Checkpoint,
    Occupy,
    Publish,
    Release,
    Reserve,
    ShortBuffer,
    Start,
    Take,
)
from psrl.coordinator.redundancy import all_served, free_places, reachable
from psrl.coordinator.staleness_state import StalenessState
from psrl.coordinator.window import fits, slack, surplus
from psrl.protocol.samples import SampleRef

__all__ = ["Entry", "Staleness", "StalenessViolation"]


class Staleness(StalenessState):
    __slots__ = ()

    # ---- groups ----------------------------------------------------------------------------------------------

    @property
    def redundant(self) -> bool:
        """More groups may be in flight than train."""
        return self.redundant_entries > self.buffer_entries

    def room(self, version: int | None = None) -> int:
        """How many further groups may be reserved at an instance that holds `version` (None: the newest)."""
        at = self.version if version is None else version
        room, due = self.window()
        first = min(at + self.staleness - self.lo, len(room) - 1)
        if not 0 <= at <= self.version or first < 0:
            return 0
        if self.redundant and not reachable(*self.protected_window(len(room)))[first]:
            return 0
        return max(0, min(slack(room, due)[first:]))

    def can_reserve(self, version: int, protected: bool = False) -> bool:
        """Whether one more group, made from weights `version`, can be promised a place with all the others."""
        if not 0 <= version <= self.version:
            return False
        room, due = self.window()
        deadline = min(version + self.staleness - self.lo, len(room) - 1)
        if deadline < 0:
            return False
        due[deadline] += 1
        if not fits(room, due):
            return False
        if not self.redundant or not (protected or self._protected):
            return True
        places, own = self.protected_window(len(room))
        own[deadline] += protected
        return all_served(places, due, own)

    def reserve(
        self,
        *,
        version: int,
        data_epoch: int,
        prompt: int,
        instance: str,
        attempt: int = 0,
        protected: bool = False,
    ) -> Reserve | None:
        """Promise a place to a new group of this prompt, made from weights `version`; None: not now (back-pressure).
        `protected`: one that will not be taken back for another group that finishes first."""
        if not self.can_reserve(version, protected):
            return None
        return Reserve(self.next_group, data_epoch, prompt, version, instance, attempt, protected)

    def release(self, group: int, reason: str, *, requeue: bool, detail: str = "") -> Release:
        """Give up a group in flight. Also one that is sealed but not taken, if its sample cannot be read: its prompt
        cannot be requeued then, it is replaced by the next. Raises StalenessViolation for any other group."""
        if not self.is_open(group) and (requeue or self._find_untaken(group) is None):
            raise StalenessViolation(f"group {group} cannot be released ({reason}): {self.describe()}")
        return Release(group, reason, REQUEUED if requeue else DROPPED, detail)

    def occupy(self, group: int, ref: SampleRef, reward_mean: float, response_tokens: int) -> list[Release | Occupy]:
        """Place a finished group in the earliest buffer that leaves every other reservation a place. With redundancy it
        is enough that those which are protected keep one; others that are left without are released first.

        Empty: the group is not in flight, placed already (a repeated message) or released.
        """
        reservation = self._open.get(group)
        if reservation is None:
            return []
        room, due = self.window()
        deadline = min(reservation.version + self.staleness - self.lo, len(room) - 1)
        if deadline >= 0:
            due[deadline] -= 1
        gone: list[int] = []
        if self.redundant and deadline >= 0:
            places, own = self.protected_window(len(room))
            own[deadline] -= reservation.protected
            i = next((i for i, free in enumerate(free_places(places, own)[: deadline + 1]) if free), -1)
            if i >= 0:
                places[i] -= 1
                room[i] = self._room_with(self.lo + i, self.filled(self.lo + i) + 1)
                gone = self._without_place(room, due, places, own, group)
        else:
            i = self._earliest(room, due, deadline)
        if i < 0:
            raise StalenessViolation(f"group {group} of version {reservation.version} has no place: {self.describe()}")
        aborted = [Release(g, REASON_REDUNDANT, REQUEUED) for g in gone]
        return [*aborted, Occupy(group, self.lo + i, ref, reward_mean, response_tokens)]

    def _earliest(self, room: list[int], due: Sequence[int], deadline: int) -> int:
        """The first buffer of the window, up to `deadline`, whose place can be spared; -1 if there is none."""
        for i in range(deadline + 1):
            if room[i]:
                before, room[i] = room[i], self._room_with(self.lo + i, self.filled(self.lo + i) + 1)
                if fits(room, due):
                    return i
                room[i] = before
        return -1

    def _without_place(
        self, room: list[int], due: list[int], places: list[int], own: list[int], occupying: int
    ) -> list[int]:
        """Open reservations that must give way, as few as possible, the youngest first (least is lost with them), the
        protected ones never."""
        if fits(room, due) and (not any(own) or all_served(places, due, own)):
            return []
        reach, last = reachable(places, own), len(room) - 1
        gone: list[int] = []
        others: list[tuple[int, int]] = []
        for r in reversed(self._open.values()):
            deadline = min(r.version + self.staleness - self.lo, last)
            if r.group == occupying or r.protected:
                continue
            if reach[deadline]:
                others.append((deadline, r.group))
            else:
                gone.append(r.group)
                due[deadline] -= 1
        for i, count in enumerate(surplus(room, due)):
            chosen = [g for deadline, g in others if deadline <= i][:count]
            gone += chosen
            others = [(deadline, g) for deadline, g in others if g not in chosen]
        return gone

    # ---- training --------------------------------------------------------------------------------------------

    def take(self, buffer: int, count: int | None = None) -> Take | None:
        """Cut a batch (count None: all of the buffer, once it is ready) or a chunk of `count` groups (the last chunk is
        what remains), in order of occupation. Only from buffer v; None: not there yet, or taken already."""
        if count is not None and count < 1:
            raise ValueError(f"take of {count} groups from buffer {buffer}: a chunk has at least one")
        capacity = self.capacity(buffer)
        if buffer != self.version or self.taken >= capacity:
            return None
        end = capacity if count is None else min(capacity, self.taken + count)
        if self.filled(buffer) < end:
            return None
        return Take(buffer, [entry.group for entry in self._entries[buffer][self.taken : end]])

    def publish(self, version: int) -> Publish | None:
        """Weights `version` are complete. None: published before (a repeated message)."""
        if version <= self.version:
            return None
        self._check_publish(version)
        return Publish(version)

    def checkpoint(self, version: int) -> Checkpoint | None:
        """The checkpoint at `version` is complete. None: known before."""
        return None if version <= self._checkpoints[-1] else Checkpoint(version)

    def start(self, version: int, start_nonce: str) -> list[Release | Start]:
        """A trainer started from the checkpoint at `version`. The same nonce again is a reconnect: nothing changes.

        A new one is a new incarnation: what was in flight is gone and its prompts return; the groups of buffers that
        `version` has not consumed are trained again, in the same order.
        """
        if start_nonce == self.start_nonce:
            return []
        self._check_start(version)
        released = [Release(group, REASON_RESTART, REQUEUED) for group in self._open]
        return [*released, Start(self.incarnation + 1, version, start_nonce)]

    def end_of_data(self, drop_last: bool) -> list[Release | ShortBuffer]:
        """No prompt is left and none is in flight: pack what is there without gaps. A rest that fills no buffer becomes
        one short last buffer, or is dropped with `drop_last`, unless chunks of it have trained already.

        Empty: groups are still in flight, or it was said before.
        """
        if self._open:
            return []
        begun, waiting = len(self._begun()), self._untaken()
        full, rest = divmod(begun + len(waiting), self.buffer_entries)
        # Once said, it stays: a short buffer that trained before a crash trains again.
        drop = rest if drop_last and self._short is None and (full or not begun) else 0
        last = self._end_with(begun + len(waiting) - drop)
        if last == self._short:
            return []
        dropped = [Release(e.group, REASON_END_OF_DATA, DROPPED) for e in waiting[len(waiting) - drop :]]
        return [*dropped, last]

    # ---- sealed samples --------------------------------------------------------------------------------------

    def live_segments(self) -> set[str]:
        """Segments that hold a group which may still be trained, or trained again after a resume. Linear in them."""
        return {entry.ref.segment for entries in self._entries.values() for entry in entries}

    def forgettable_segments(self, segments: Iterable[str]) -> list[str]:
        """Those of `segments` that no resume needs. Ask only about segments whose writer has finished with them: a
        group that is sealed but not yet placed is unknown here."""
        live = self.live_segments()
        return [segment for segment in segments if segment not in live]
