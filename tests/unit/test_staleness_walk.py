"""Every interleaving of a small run, breadth first: two instances that pull at any time, groups that finish in any
order, fail or are aborted, chunks, redundancy, checkpoints at any version, a crash and a resume from any of them.

States that differ only in group numbers are one state. Checked on every transition: a group finishes in exactly one
buffer and stays there until its consumption is final; a shipped group is within the bound; a published buffer held
exactly B groups. Checked in every state: all reservations fit, and if the run is not over something can go on. Each
such step raises `progress`, which is bounded, so a run whose groups finish and whose instances pull always ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import pytest

from psrl.coordinator.records import AnyRecord, Checkpoint, Occupy, Publish, Release, Reserve, ShortBuffer, Start, Take
from psrl.coordinator.staleness import Staleness, StalenessViolation
from psrl.coordinator.window import fits
from psrl.protocol.samples import SampleRef

pytestmark = pytest.mark.unit
REF = SampleRef("s", 0, 1, 0, [1])
NOT_LOADED = -1


@dataclass(frozen=True, slots=True)
class World:
    """A state, the version at each instance, and the prompts left (None: without end)."""

    state: Staleness
    instances: tuple[int, ...]
    prompts: int | None
    protects: bool = False
    """Prompts that gave way before come too, at any time."""

    def key(self) -> tuple:
        s = self.state
        buffers = tuple(
            (
                b,
                tuple(sorted(e.version for e in s.taken_groups(b))),
                tuple(sorted(e.version for e in s.entries(b)[len(s.taken_groups(b)) :])),
            )
            for b in sorted(s._entries)
            if s.filled(b)
        )
        # Which reservation redundancy aborts depends on their order, nothing else does.
        in_flight = [(r.version, r.protected) for r in s.open_groups()]
        ordered = in_flight if s.redundant_entries > s.buffer_entries else sorted(in_flight)
        resume = (s.final, *(s._checkpoints if s.keep_checkpoints > 1 else ()))
        ended = s._short
        return (s.version, s.lo, resume, tuple(sorted(self.instances)), tuple(ordered), buffers, self.prompts, ended)

    def progress(self) -> tuple[int, ...]:
        s = self.state
        placed = sum(s.filled(b) for b in s._entries if b >= s.version)
        return (s.version, s._short is not None, placed, s.taken, sum(self.instances), s.num_open)

    def over(self) -> bool:
        return self.state.data_ended(self.state.version)


def kept(state: Staleness) -> dict[int, list[int]]:
    return {b: [e.group for e in entries] for b, entries in state._entries.items() if entries}


def check_state(world: World) -> None:
    s = world.state
    room, due = s.window()
    assert fits(room, due) and min(due, default=0) >= 0, s.describe()
    groups = [g for numbers in kept(s).values() for g in numbers]
    assert len(groups) == len(set(groups)) and not set(groups) & {r.group for r in s.open_groups()}
    for b in s._entries:
        assert s.filled(b) <= s.buffer_entries
        assert b >= s.version or s.filled(b) == s.capacity(b)
        assert all(0 <= lag <= s.staleness for lag in s.lags(b) if b >= s.version), s.describe()


def check_transition(before: Staleness, record: AnyRecord, after: Staleness) -> None:
    """What `record` may change of who is where; `before` is the state right before that record."""
    old, new = kept(before), kept(after)
    open_before = {r.group for r in before.open_groups()}
    open_after = {r.group for r in after.open_groups()}
    if isinstance(record, Occupy):
        assert before.lo <= record.buffer
        old.setdefault(record.buffer, []).append(record.group)
        open_before.remove(record.group)
    elif isinstance(record, Release):
        if record.group in open_before:
            given_way = {r.group for r in before.open_groups() if not r.protected}
            assert record.reason != "redundant" or record.group in given_way
            open_before.remove(record.group)
        else:  # only at the end of the data with drop_last: from the very end
            last = max(old)
            assert record.reason == "end_of_data" and record.group in old[last]
            old[last].remove(record.group)
            old = {b: numbers for b, numbers in old.items() if numbers}
    elif isinstance(record, Reserve):
        open_before.add(record.group)
    elif isinstance(record, Take):
        for entry in before.entries(record.buffer):
            if entry.group in record.groups:
                assert entry.version + before.staleness >= record.buffer
    elif isinstance(record, Publish):
        trained = before.filled(record.version - 1)
        assert trained == before.buffer_entries or before._short == ShortBuffer(record.version - 1, trained)
    elif isinstance(record, Checkpoint):
        old = {b: numbers for b, numbers in old.items() if b >= after.final}
    elif isinstance(record, Start):
        assert not open_before
        old = {b: numbers for b, numbers in old.items() if b >= after.final}
        assert after.version == after.lo == record.version and after.taken == 0
    elif isinstance(record, ShortBuffer):
        assert [g for b in sorted(old) for g in old[b]] == [g for b in sorted(new) for g in new[b]]
        sizes = {b: len(numbers) for b, numbers in new.items() if b >= before.lo}
        assert all(size == before.buffer_entries or b == max(sizes) for b, size in sizes.items())
        old = new
    assert new == old and open_after == open_before


def follow(world: World, records: list[AnyRecord], instances: tuple[int, ...] | None = None) -> World:
    state, prompts = world.state, world.prompts
    for record in records:
        before, state = state, state.copy()
        state.apply(record)
        check_transition(before, record, state)
        if prompts is not None:
            prompts += {Reserve: -1, Release: getattr(record, "outcome", "") == "requeued"}.get(type(record), 0)
    return replace(world, state=state, instances=world.instances if instances is None else instances, prompts=prompts)


def group_choices(state: Staleness) -> list[int]:
    """One group of each kind in flight."""
    if state.redundant_entries > state.buffer_entries:
        return [r.group for r in state.open_groups()]
    return list({r.version: r.group for r in state.open_groups()}.values())


def ways_on(world: World, drop_last: bool) -> list[World]:
    """What happens if nothing goes wrong."""
    s, out = world.state, []
    for i, version in enumerate(world.instances):
        if version != s.version:
            out.append(replace(world, instances=(*world.instances[:i], s.version, *world.instances[i + 1 :])))
        for protected in (False, True) if world.protects else (False,):
            of_prompt = {"data_epoch": 0, "prompt": 0, "instance": "i", "protected": protected}
            if world.prompts != 0 and (record := s.reserve(version=version, **of_prompt)):
                out.append(follow(world, [record]))
    out += [follow(world, s.occupy(group, REF, 0.0, 1)) for group in group_choices(s)]
    out += [follow(world, [record]) for count in (None, 1) if (record := s.take(s.version, count))]
    if s.is_taken(s.version):
        record = s.publish(s.version + 1)
        assert record is not None
        out.append(follow(world, [record]))
    if world.prompts == 0 and (records := s.end_of_data(drop_last)):
        out.append(follow(world, records))
    for successor in out:
        assert successor.progress() > world.progress()
    return out


def ways_aside(world: World) -> list[World]:
    """What may happen besides: failures, checkpoints, a crash and a resume from any checkpoint that may exist."""
    s, out = world.state, []
    outcomes = (True, False) if world.prompts is not None else (True,)
    for group in group_choices(s):
        out += [follow(world, [s.release(group, "error", requeue=requeue)]) for requeue in outcomes]
    if record := s.checkpoint(s.version):
        out.append(follow(world, [record]))
    for version in range(s.final, s.lo + 1):
        out.append(follow(world, s.start(version, f"{s.start_nonce}+"), (NOT_LOADED,) * len(world.instances)))
    return out


def walk(world: World, drop_last: bool = False) -> int:
    """Visit everything reachable; number of states."""
    seen = {world.key()}
    queue = deque([world])
    while queue:
        world = queue.popleft()
        check_state(world)
        on = ways_on(world, drop_last)
        assert on or world.over(), f"deadlock: {world.state.describe()}, instances {world.instances}"
        for successor in (*on, *ways_aside(world)):
            key = successor.key()
            if key not in seen:
                seen.add(key)
                queue.append(successor)
    return len(seen)


def begin(machine: type[Staleness], prompts: int | None = None, **sizes: int) -> World:
    state = machine(**sizes)
    for record in state.start(0, "0"):
        state.apply(record)
    return World(state, (NOT_LOADED, NOT_LOADED), prompts)


@pytest.mark.parametrize(
    ("buffer_entries", "redundant_entries", "staleness", "total_steps", "keep_checkpoints"),
    [
        (1, 1, 0, 4, 1),
        (1, 1, 1, 4, 1),
        (1, 1, 2, 4, 1),
        (1, 2, 0, 4, 1),
        (1, 2, 2, 4, 1),
        (1, 3, 1, 4, 1),
        (2, 2, 0, 4, 2),
        (2, 3, 0, 4, 1),
        (2, 2, 1, 3, 2),
        (2, 2, 1, 4, 1),
        (2, 3, 1, 3, 1),
        pytest.param(2, 2, 2, 4, 1, marks=pytest.mark.slow),
        (2, 3, 2, 3, 1),
        pytest.param(2, 3, 2, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving(
    buffer_entries: int, redundant_entries: int, staleness: int, total_steps: int, keep_checkpoints: int
) -> None:
    world = begin(
        Staleness,
        buffer_entries=buffer_entries,
        redundant_entries=redundant_entries,
        staleness=staleness,
        total_steps=total_steps,
        keep_checkpoints=keep_checkpoints,
    )
    assert walk(world) > 100


@pytest.mark.parametrize(
    ("buffer_entries", "redundant_entries", "staleness", "total_steps"),
    [(1, 2, 0, 3), (1, 2, 1, 3), (2, 4, 0, 3), (1, 3, 2, 2), (2, 3, 1, 2)],
)
def test_every_interleaving_with_prompts_that_gave_way_before(
    buffer_entries: int, redundant_entries: int, staleness: int, total_steps: int
) -> None:
    world = begin(
        Staleness,
        buffer_entries=buffer_entries,
        redundant_entries=redundant_entries,
        staleness=staleness,
        total_steps=total_steps,
    )
    assert walk(replace(world, protects=True)) > 100


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("buffer_entries", "redundant_entries", "staleness", "prompts"),
    [(1, 1, 1, 3), (2, 2, 0, 3), (2, 2, 1, 5), (2, 3, 2, 5), (2, 2, 2, 4)],
)
def test_every_interleaving_until_the_data_ends(
    buffer_entries: int, redundant_entries: int, staleness: int, prompts: int, drop_last: bool
) -> None:
    world = begin(
        Staleness,
        prompts,
        buffer_entries=buffer_entries,
        redundant_entries=redundant_entries,
        staleness=staleness,
    )
    assert walk(world, drop_last) > 100


class ReservesByTotal(Staleness):
    """Admits by the total room, whatever the deadlines."""

    def can_reserve(self, version: int, protected: bool = False) -> bool:
        room, due = self.window()
        return 0 <= version <= self.version and version + self.staleness >= self.lo and sum(due) < sum(room)


class PlacesFirstComeFirstServed(Staleness):
    """Takes the earliest buffer, even when another reservation cannot go elsewhere."""

    def occupy(self, group: int, ref: SampleRef, reward_mean: float, response_tokens: int) -> list:
        last = self._open[group].version + self.staleness
        buffer = next(b for b in range(self.lo, last + 1) if self.filled(b) < self.capacity(b))
        return [Occupy(group, buffer, ref, reward_mean, response_tokens)]


class LowersAllTheWay(Staleness):
    """Resumes with V := min(V, checkpoint) for groups in later buffers too."""

    def _apply_start(self, record: Start) -> None:
        super()._apply_start(record)
        for entries in self._entries.values():
            entries[:] = [msgspec.structs.replace(e, version=min(e.version, record.version)) for e in entries]

    _APPLY: ClassVar = {**Staleness._APPLY, Start: _apply_start}


class ForgetsAtPublication(Staleness):
    """Treats a published buffer as consumed for good."""

    def _apply_publish(self, record: Publish) -> None:
        super()._apply_publish(record)
        self._entries.pop(record.version - 1)

    _APPLY: ClassVar = {**Staleness._APPLY, Publish: _apply_publish}


class PublishesEarly(Staleness):
    """Publishes once a chunk of the buffer has trained."""

    def is_taken(self, buffer: int) -> bool:
        return buffer < self.lo or (buffer == self.version and self.taken > 0)

    def _check_publish(self, version: int) -> None:
        self.lo = version


@pytest.mark.parametrize(
    "broken", [ReservesByTotal, PlacesFirstComeFirstServed, LowersAllTheWay, ForgetsAtPublication, PublishesEarly]
)
def test_the_walk_finds_a_broken_rule(broken: type[Staleness]) -> None:
    with pytest.raises((AssertionError, StalenessViolation)):
        walk(begin(broken, buffer_entries=2, staleness=1, total_steps=3))
