"""The slot table: the newest whole version can always be read, and a writer never meets a reader."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psrl.weights.store import Slot, SlotState, SlotTable, VersionNotHeldError

pytestmark = pytest.mark.unit


def publish(table: SlotTable, version: int, incarnation: int = 0) -> tuple[Slot, tuple[str, ...]]:
    slot, revoked = table.begin_write(version, incarnation)
    table.finish_write(slot, (100 * incarnation + version,))
    return slot, revoked


def test_the_two_newest_versions_are_held() -> None:
    table = SlotTable()
    with pytest.raises(VersionNotHeldError, match=r"version 0 of incarnation 0 is not held here \(held: none\)"):
        table.open(0, 0, "a", 10.0)
    for version in range(4):
        publish(table, version)
    assert [table.open(version, 0, f"r{version}", 10.0).checksums for version in (2, 3)] == [(2,), (3,)]
    for version, incarnation in [(1, 0), (4, 0), (3, 1)]:
        with pytest.raises(VersionNotHeldError, match=r"held: 2 of incarnation 0, 3 of incarnation 0"):
            table.open(version, incarnation, "a", 10.0)


@pytest.mark.parametrize(("version", "incarnation"), [(5, 1), (4, 1), (9, 0)])
def test_older_versions_are_refused(version: int, incarnation: int) -> None:
    table = SlotTable()
    publish(table, 5, 1)
    with pytest.raises(ValueError, match="not newer than the published version 5 of incarnation 1"):
        table.begin_write(version, incarnation)


def test_a_new_incarnation_may_go_back_to_an_older_version() -> None:
    table = SlotTable()
    publish(table, 5, 1)
    publish(table, 3, 2)
    assert table.newest is not None and table.newest.age == (2, 3)


def test_a_version_being_written_cannot_be_read() -> None:
    table = SlotTable()
    publish(table, 0)
    slot, _ = table.begin_write(1, 0)
    assert slot.state is SlotState.WRITING and slot.sequence % 2 == 1
    with pytest.raises(VersionNotHeldError, match="held: 0 of incarnation 0"):
        table.open(1, 0, "a", 10.0)
    with pytest.raises(RuntimeError, match="another version is being written"):
        table.begin_write(2, 0)
    table.finish_write(slot, 7)
    assert table.open(1, 0, "a", 10.0).sequence % 2 == 0


def test_a_failed_write_leaves_the_newest_version_and_a_free_slot() -> None:
    table = SlotTable()
    publish(table, 0)
    slot, _ = table.begin_write(1, 0)
    table.abandon_write(slot)
    assert table.open(0, 0, "a", 10.0).version == 0
    assert publish(table, 1)[0] is slot


def test_readers_of_the_slot_to_be_written_lose_it_but_still_count_until_they_leave() -> None:
    table = SlotTable()
    publish(table, 0)
    table.open(0, 0, "slow", 10.0)
    publish(table, 1)
    table.open(1, 0, "newest", 10.0)
    assert list(table.target().readers) == ["slow"]
    slot, revoked = publish(table, 2)
    assert revoked == ("slow",) and slot.readers == {} and table.num_readers() == 2
    table.close("slow")
    table.close("slow")
    assert table.num_readers() == 1


def test_a_reader_pins_one_slot_at_a_time() -> None:
    table = SlotTable()
    publish(table, 0)
    publish(table, 1)
    table.open(0, 0, "a", 10.0)
    table.open(1, 0, "a", 10.0)
    assert not table.target().readers and table.num_readers() == 1


def test_a_vanished_reader_is_let_go_when_its_lease_ends() -> None:
    table = SlotTable()
    publish(table, 0)
    table.open(0, 0, "a", 10.0)
    table.open(0, 0, "b", 20.0)
    assert table.expire(9.99) == () and table.expire(10.0) == ("a",)
    assert table.num_readers() == 1


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable()
        self.now = 0.0
        self.published: list[tuple[int, int]] = []
        self.writing: tuple[Slot, tuple[int, int]] | None = None
        self.sequences = (0, 0)

    def next_age(self, jump: bool) -> tuple[int, int]:
        incarnation, version = self.published[-1] if self.published else (0, -1)
        return (incarnation + 1, max(0, version - 2)) if jump else (incarnation, version + 1)

    @precondition(lambda self: self.writing is None)
    @rule(jump=st.booleans())
    def begin(self, jump: bool) -> None:
        age = self.next_age(jump)
        slot, revoked = self.table.begin_write(age[1], age[0])
        assert not slot.readers and all(reader in self.table.revoked for reader in revoked)
        self.writing = slot, age

    @precondition(lambda self: self.writing is not None)
    @rule(works=st.booleans())
    def end(self, works: bool) -> None:
        assert self.writing is not None
        slot, age = self.writing
        if works:
            self.table.finish_write(slot, hash(age) & 0xFFFF)
            self.published.append(age)
        else:
            self.table.abandon_write(slot)
        self.writing = None

    @rule(reader=st.sampled_from("abcd"), back=st.integers(0, 3), lease=st.floats(0.1, 5.0))
    def open(self, reader: str, back: int, lease: float) -> None:
        if back >= len(self.published):
            return
        incarnation, version = self.published[-1 - back]
        try:
            slot = self.table.open(version, incarnation, reader, self.now + lease)
        except VersionNotHeldError:
            assert back > 0  # the newest is always there
            return
        assert slot.state is SlotState.READY and slot.age == (incarnation, version) and slot.sequence % 2 == 0

    @rule(reader=st.sampled_from("abcd"))
    def close(self, reader: str) -> None:
        self.table.close(reader)

    @rule(seconds=st.floats(0.0, 3.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)

    @invariant()
    def the_newest_version_is_whole(self) -> None:
        newest = self.table.newest
        assert (newest.age if newest else None) == (self.published[-1] if self.published else None)

    @invariant()
    def nobody_reads_what_is_being_written(self) -> None:
        for slot in self.table.slots:
            assert (slot.sequence % 2 == 1) == (slot.state is SlotState.WRITING)
            assert slot.state is SlotState.READY or not slot.readers

    @invariant()
    def sequences_only_grow(self) -> None:
        now = tuple(slot.sequence for slot in self.table.slots)
        assert all(new >= old for new, old in zip(now, self.sequences, strict=True))
        self.sequences = now


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=100, stateful_step_count=40)
