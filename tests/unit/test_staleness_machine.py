"""Random long runs of staleness, prompts and journal together, against independent bookkeeping: a matching found by
search instead of Hall's condition, and a list of which prompts may still be made."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psrl.audit import audit
from psrl.coordinator.prompts import PromptSource
from psrl.coordinator.records import AnyRecord, Occupy, Release, Reserve
from psrl.coordinator.staleness import Staleness
from psrl.protocol.samples import SampleRef

pytestmark = pytest.mark.unit


def matching_exists(places: list[int], deadlines: list[int]) -> bool:
    """Whether each reservation gets a place of its own in a buffer no later than its deadline (augmenting paths)."""
    holder: dict[int, int] = {}

    def assign(reservation: int, tried: set[int]) -> bool:
        for place, buffer in enumerate(places):
            if buffer <= deadlines[reservation] and place not in tried:
                tried.add(place)
                if place not in holder or assign(holder[place], tried):
                    holder[place] = reservation
                    return True
        return False

    return all(assign(reservation, set()) for reservation in range(len(deadlines)))


class Run(RuleBasedStateMachine):
    @initialize(
        buffer_entries=st.integers(1, 3),
        extra=st.sampled_from([0, 0, 1, 2]),
        staleness=st.integers(0, 3),
        total_steps=st.sampled_from([None, None, 3, 6]),
        keep_checkpoints=st.integers(1, 2),
        num_prompts=st.integers(2, 9),
        total_epochs=st.sampled_from([None, 1, 2]),
        drop_last=st.booleans(),
    )
    def begin(
        self,
        buffer_entries: int,
        extra: int,
        staleness: int,
        total_steps: int | None,
        keep_checkpoints: int,
        num_prompts: int,
        total_epochs: int | None,
        drop_last: bool,
    ) -> None:
        self.sizes = {
            "buffer_entries": buffer_entries,
            "redundant_entries": buffer_entries + extra,
            "staleness": staleness,
            "total_steps": total_steps,
            "keep_checkpoints": keep_checkpoints,
        }
        self.data = {"num_prompts": num_prompts, "seed": 3, "total_epochs": total_epochs}
        self.drop_last = drop_last
        self.state = Staleness(**self.sizes)
        self.prompts = PromptSource(**self.data)
        self.journal: list[AnyRecord] = []
        self.instances = [0, 0]
        self.starts = 0
        self.commit(self.state.start(0, "0"))

    def commit(self, records: list) -> None:
        for record in records:
            self.state.apply(record)
            self.prompts.apply(record)
            self.journal.append(record)

    def places(self) -> list[int]:
        """Free places of the open buffers, each named by its buffer."""
        s, last = self.state, self.state.last_buffer
        top = s.version + s.staleness if last is None else min(last, s.version + s.staleness)
        out: list[int] = []
        for b in range(s.lo, top + 1):
            if len(s.entries(b)) < s.capacity(b):
                out += [b] * (s.redundant_entries - len(s.entries(b)))
        return out

    def deadlines(self) -> list[int]:
        return [r.version + self.state.staleness for r in self.state.open_groups()]

    def training_places(self) -> list[int]:
        """Those of `places` that train: with redundancy fewer than may be promised."""
        extra = self.state.redundant_entries - self.state.buffer_entries
        free = Counter(self.places())
        return [b for b, count in free.items() for _ in range(count - extra)]

    def protected(self) -> list[int]:
        return [r.version + self.state.staleness for r in self.state.open_groups() if r.protected]

    def all_served(self, protected: list[int], others: list[int]) -> bool:
        """All protected ones have a place that trains, and each other one, taken alone, has one beside them."""
        places = self.training_places()
        return matching_exists(places, protected) and all(matching_exists(places, [*protected, d]) for d in others)

    # ---- what instances and agent loops do ----

    @rule(i=st.integers(0, 1))
    def pull(self, i: int) -> None:
        self.instances[i] = self.state.version

    @rule(i=st.integers(0, 1), most=st.integers(1, 6))
    def dispatch(self, i: int, most: int) -> None:
        for _ in range(most):
            position, version = self.prompts.peek(), self.instances[i]
            if position is None:
                return
            deadline = version + self.state.staleness
            fits = deadline >= self.state.lo and matching_exists(self.places(), [*self.deadlines(), deadline])
            if fits and self.state.redundant:
                own = self.protected()
                others = [r.version + self.state.staleness for r in self.state.open_groups() if not r.protected]
                (own if position.protected else others).append(deadline)
                fits = self.all_served(own, others)
            room = self.state.room(version)
            record = self.state.reserve(version=version, instance=f"i{i}", **position._asdict())
            assert (record is not None) == fits
            assert position.protected or fits == (room > 0)
            if record is None:
                return
            self.commit([record])
            assert position.protected or self.state.room(version) == room - 1

    @precondition(lambda self: self.state.num_open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([r.group for r in self.state.open_groups()]))
        records = self.state.occupy(group, SampleRef(f"s{group % 3}", group, 1, 0, [2]), 0.5, 9)
        occupy = records[-1]
        assert isinstance(occupy, Occupy) and self.state.lo <= occupy.buffer
        if self.sizes["redundant_entries"] == self.sizes["buffer_entries"]:
            assert len(records) == 1
            earlier = [b for b in self.places() if b < occupy.buffer]
            others = [r.version + self.state.staleness for r in self.state.open_groups() if r.group != group]
            for b in set(earlier):
                without = self.places()
                without.remove(b)
                assert not matching_exists(without, others), f"buffer {b} would have done"
        for record in records[:-1]:
            assert isinstance(record, Release) and record.reason == "redundant"
        self.commit(records)

    @precondition(lambda self: self.state.num_open)
    @rule(data=st.data(), requeue=st.booleans(), reason=st.sampled_from(["error", "filtered", "agent_loop_lost"]))
    def fail(self, data: st.DataObject, requeue: bool, reason: str) -> None:
        group = data.draw(st.sampled_from([r.group for r in self.state.open_groups()]))
        self.commit([self.state.release(group, reason, requeue=requeue)])

    # ---- what the trainer does ----

    @rule(chunk=st.sampled_from([None, None, 1, 2]))
    def take(self, chunk: int | None) -> None:
        if record := self.state.take(self.state.version, chunk):
            self.commit([record])

    @precondition(lambda self: self.state.is_taken(self.state.version))
    @rule()
    def publish(self) -> None:
        self.commit([self.state.publish(self.state.version + 1)])

    @rule()
    def checkpoint(self) -> None:
        if record := self.state.checkpoint(self.state.version):
            self.commit([record])

    @precondition(lambda self: self.prompts.exhausted)
    @rule()
    def end_of_data(self) -> None:
        self.commit(self.state.end_of_data(self.drop_last))

    @rule(back=st.integers(0, 3))
    def crash_and_resume(self, back: int) -> None:
        version = max(self.state.final, self.state.version - back)
        before = {b: self.state.entries(b) for b in range(version, self.state.version + 9)}
        self.starts += 1
        self.commit(self.state.start(version, str(self.starts)))
        self.instances = [version, version]
        for b, entries in before.items():
            assert [e.group for e in self.state.entries(b)] == [e.group for e in entries]

    @rule()
    def coordinator_restart(self) -> None:
        state, prompts = Staleness(**self.sizes), PromptSource(**self.data)
        for record in self.journal:
            state.apply(record)
            prompts.apply(record)
        assert state.snapshot() == self.state.snapshot() and prompts.snapshot() == self.prompts.snapshot()
        self.state, self.prompts = state, prompts

    # ---- always ----

    @invariant()
    def every_reservation_has_a_place(self) -> None:
        last = self.state.last_buffer
        deadlines = self.deadlines() if last is None else [min(last, d) for d in self.deadlines()]
        assert matching_exists(self.places(), deadlines)
        if self.state.redundant:
            flags = [r.protected for r in self.state.open_groups()]
            own = [d for d, protected in zip(deadlines, flags, strict=True) if protected]
            assert self.all_served(own, [d for d, protected in zip(deadlines, flags, strict=True) if not protected])

    @invariant()
    def no_prompt_gives_way_twice(self) -> None:
        prompts = {r.group: (r.data_epoch, r.prompt) for r in self.journal if isinstance(r, Reserve)}
        gave_way = Counter(prompts[r.group] for r in self.journal if isinstance(r, Release) and r.reason == "redundant")
        assert not gave_way or max(gave_way.values()) == 1

    @invariant()
    def buffers_are_within_bounds(self) -> None:
        s = self.state
        for b in range(s.version, s.version + 9):
            assert len(s.entries(b)) <= s.buffer_entries
            assert all(0 <= lag <= s.staleness for lag in s.lags(b))

    @invariant()
    def no_prompt_is_in_two_places(self) -> None:
        here = Counter((r.data_epoch, r.prompt) for r in self.state.open_groups())
        here.update((e.data_epoch, e.prompt) for entries in self.state._entries.values() for e in entries)
        waiting = self.prompts.snapshot()["returned"]
        here.update((p.data_epoch, p.prompt) for p in waiting)  # type: ignore[attr-defined]
        assert not here or max(here.values()) == 1

    def teardown(self) -> None:
        if not hasattr(self, "journal"):
            return
        report = audit(self.journal, buffer_entries=self.state.buffer_entries, staleness=self.state.staleness)
        assert report.findings == []
        assert report.reserved == self.state.next_group == sum(report.fates.values())
        assert report.fates["open"] == self.state.num_open
        assert report.steps == self.state.version
        if report.max_lag is not None:
            assert report.max_lag <= self.state.staleness


Run.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestRun = Run.TestCase
