"""Redundancy, filters and stragglers in the coordinator, message by message; and the pure decisions behind them."""

from __future__ import annotations

import pytest
from coordinator_run import Run, assigned, of
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.coordinator.core import Coordinator
from psrl.coordinator.filters import FilterBudget
from psrl.coordinator.prompts import PromptSource
from psrl.coordinator.records import Occupy, Release, Start
from psrl.coordinator.redundancy import all_served, free_places, reachable
from psrl.coordinator.routing.request_num_balance import RequestNumBalance
from psrl.coordinator.staleness import Staleness
from psrl.coordinator.stragglers import StragglerWatch
from psrl.protocol import control as c
from psrl.protocol.samples import SampleRef

pytestmark = pytest.mark.unit
REF = SampleRef("s", 0, 1, 0, [4] * 4)


# ---- redundancy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "protected", "free", "reach"),
    [
        ([2], [0], [True], [True]),
        ([2], [2], [False], [False]),
        ([1, 1], [1, 0], [False, True], [False, True]),
        ([1, 1], [0, 1], [True, True], [True, True]),
        ([1, 1], [0, 2], [False, False], [False, False]),
        ([0, 2], [0, 1], [False, True], [False, True]),
        ([2, 1], [1, 1], [True, True], [True, True]),
        ([2, 0], [1, 0], [True, False], [True, True]),
    ],
)
def test_places_that_protected_groups_can_spare(
    places: list[int], protected: list[int], free: list[bool], reach: list[bool]
) -> None:
    assert free_places(places, protected) == free and reachable(places, protected) == reach


@pytest.mark.parametrize(
    ("places", "due", "protected", "served"),
    [
        ([2], [3], [1], True),
        ([2], [3], [2], False),
        ([2], [2], [2], True),
        ([1], [2], [2], False),
        ([1, 1], [1, 1], [1, 0], True),
        ([1, 1], [2, 0], [1, 0], False),
    ],
)
def test_everybody_is_served(places: list[int], due: list[int], protected: list[int], served: bool) -> None:
    assert all_served(places, due, protected) is served


def redundant(buffer_entries: int, launched: int, staleness: int, steps: int = 4, **changes) -> tuple[Run, list]:
    """As `coordinator_run.started`, with `launched` groups a buffer."""
    run = Run(**changes)
    state = Staleness(buffer_entries=buffer_entries, redundant_entries=launched, staleness=staleness, total_steps=steps)
    source = PromptSource(num_prompts=100, seed=0, shuffle=False)
    run.core = Coordinator(run.core.settings, state, source, RequestNumBalance(), epoch=1, now_s=0.0)
    run.trainer()
    for name in ("instance-0", "instance-1"):
        run.instance(name)
        run.pulled(name, 0)
    return run, assigned(run.hello("agent_loop", "agent-loop-0", c.AgentState()))


def test_groups_that_give_way_are_aborted_and_their_prompts_come_first() -> None:
    run, groups = redundant(2, 4, 0, kept_samples=3)
    assert [(g.n, g.keep) for g in groups] == [(4, 3)] * 4
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    assert of(run.finish(groups[2].group), c.GroupAbort) == []
    said = run.finish(groups[0].group)
    assert [(m.groups, m.reason) for m in of(said, c.GroupAbort)] == [([3], "redundant"), ([1], "redundant")]
    assert [[g.group for g in m.groups] for m in of(said, c.Buffer)] == [[2, 0]]
    assert run.core.counters["redundant"] == 2
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    again = assigned(run.pulled("instance-0", 1))
    # Both places that train are theirs now: nobody else could take one, so nobody else is asked.
    assert [g.prompt for g in again] == [3, 1]
    assert of(run.finish(again[1].group), c.GroupAbort) == []
    assert of(run.finish(again[0].group), c.GroupAbort) == []


@settings(max_examples=40)
@given(
    buffer_entries=st.integers(1, 4),
    extra=st.integers(0, 4),
    staleness=st.integers(0, 2),
    long=st.sets(st.integers(0, 11), max_size=4),
)
def test_long_prompts_do_not_starve(buffer_entries: int, extra: int, staleness: int, long: set[int]) -> None:
    """Whoever has a long answer finishes last, always. In two passes over 12 prompts each prompt still trains twice."""
    steps = 24 // buffer_entries
    state = Staleness(
        buffer_entries=buffer_entries, redundant_entries=buffer_entries + extra, staleness=staleness, total_steps=steps
    )
    source = PromptSource(num_prompts=12, seed=0, shuffle=False, total_epochs=2)
    run = Run()
    run.core = Coordinator(run.core.settings, state, source, RequestNumBalance(), epoch=1, now_s=0.0)
    run.trainer(wants=0)
    run.instance("instance-0")
    run.pulled("instance-0", 0)
    run.hello("agent_loop", "agent-loop-0", c.AgentState())
    core = run.core
    for _ in range(1000):
        if state.version == steps:
            break
        if state.is_taken(state.version):
            version = state.version + 1
            run.tell("trainer-0", c.Published(version=version, incarnation=0))
            run.tell("trainer-0", c.WantBuffer(buffer=version, incarnation=0))
            run.pulled("instance-0", version)
            continue
        flying = sorted(state.open_groups(), key=lambda r: (r.prompt in long, r.group))
        assert flying, state.describe()
        run.finish(flying[0].group)
    assert state.version == steps and core.ended is None
    gave_way = [r.group for r in run.records if isinstance(r, Release) and r.reason == "redundant"]
    position = {r.group: (r.data_epoch, r.prompt) for r in run.records if type(r).__name__ == "Reserve"}
    assert len({position[g] for g in gave_way}) == len(gave_way), "a prompt gave way twice"
    placed = [position[r.group] for r in run.records if isinstance(r, Occupy)]
    assert len(set(placed)) == len(placed) == 24 - 24 % buffer_entries


# ---- filters -------------------------------------------------------------------------------------------------


def test_the_budget_counts_groups_in_a_row_and_begins_anew_with_a_trainer() -> None:
    budget = FilterBudget(limit=2, buffer_entries=2, metric="acc")
    for group in range(4):
        budget.apply(Release(group, "filtered", "dropped"))
    assert budget.verdict() is None
    budget.apply(Release(4, "error", "dropped"))
    assert budget.verdict() is None
    budget.apply(Release(5, "filtered", "dropped"))
    verdict = budget.verdict()
    assert verdict is not None and verdict.startswith(
        "0 of 5 groups in a row could train: algorithm.filter_groups.metric=acc"
    )
    assert "algorithm.filter_groups.max_num_gen_batches=2 buffers of 2 groups" in verdict
    for record in (Occupy(6, 0, REF, 0.5, 8), Start(1, 0, "b")):
        budget.in_a_row = 5
        budget.apply(record)
        assert budget.verdict() is None and budget.in_a_row == 0


def test_filtered_groups_end_the_run_when_there_are_too_many() -> None:
    run, groups = redundant(2, 2, 0, max_filtered_buffers=1)
    for number in range(2):
        failed = c.GroupFailed(group=groups[number].group, reason="filtered", detail="equal", retry=True)
        groups += assigned(run.tell("agent-loop-0", failed))
    assert [g.prompt for g in groups] == [0, 1, 2, 3], "each was replaced by the next prompt"
    said = run.tell("agent-loop-0", c.GroupFailed(group=2, reason="filtered", detail="equal", retry=False))
    (verdict, *_) = of(said, c.Shutdown)
    assert verdict.status == "failed" and "0 of 3 groups" in verdict.cause
    assert run.core.counters["filtered"] == 3
    assert not any(name.startswith("filtered/") for name in run.core.counters), "no counter a prompt"


# ---- stragglers ----------------------------------------------------------------------------------------------


def stragglers(method: str, buffer_entries: int = 4, staleness: int = 0, **changes) -> tuple[Run, list]:
    return redundant(
        buffer_entries, buffer_entries, staleness, straggler_method=method, straggler_threshold=0.5, **changes
    )


def test_truncation_waits_until_the_trainer_waits_for_a_buffer_that_is_full_enough() -> None:
    run, groups = stragglers("truncate")
    run.finish(groups[1].group)
    run.finish(groups[3].group)
    assert run.core.counters["truncated"] == 0
    said = run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    assert [m.groups for m in of(said, c.GroupTruncate)] == [[0], [2]]
    assert of(run.settle(), c.GroupTruncate) == [], "once a group"
    said = run.tell("agent-loop-0", c.GroupFailed(group=0, reason="empty_truncation", detail="", retry=False))
    (new,) = assigned(said)
    assert of(said, c.GroupTruncate) == [] and new.prompt == 4, "what replaces it is left alone"
    run.finish(groups[2].group)
    (buffer,) = of(run.finish(new.group), c.Buffer)
    assert [g.group for g in buffer.groups] == [1, 3, 2, new.group]
    assert run.core.counters["truncated"] == 2 and run.core.counters["empty_truncation"] == 1


def test_only_as_many_as_are_missing_are_truncated_the_oldest_first() -> None:
    run, groups = stragglers("truncate", staleness=1)
    assert len(groups) == 8
    for g in (groups[1], groups[5], groups[7]):
        run.finish(g.group)
    said = run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    assert [m.groups for m in of(said, c.GroupTruncate)] == [[0]]
    assert of(run.settle(), c.GroupTruncate) == []


def test_a_retried_group_returns_once_and_is_then_left_alone() -> None:
    run, groups = stragglers("retry")
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    run.finish(groups[1].group)
    said = run.finish(groups[3].group)
    assert [(m.groups, m.reason) for m in of(said, c.GroupAbort)] == [([0], "straggler"), ([2], "straggler")]
    said += run.settle()
    again = assigned(said)
    assert [g.prompt for g in again] == [0, 2] and of(said, c.GroupTruncate) == []
    assert of(run.settle(), c.GroupAbort) == [] and run.core.counters["retried"] == 2
    run.finish(again[0].group)
    (buffer,) = of(run.finish(again[1].group), c.Buffer)
    assert len(buffer.groups) == 4


@pytest.mark.parametrize(
    ("method", "threshold", "filled", "waits", "chosen"),
    [
        (None, None, 3, True, 0),
        ("truncate", 0.5, 1, True, 0),
        ("truncate", 0.5, 2, True, 2),
        ("truncate", 0.75, 2, True, 0),
        ("truncate", 0.75, 3, True, 1),
        ("truncate", 0.5, 4, True, 0),
        ("retry", 0.5, 3, True, 1),
        ("retry", 0.5, 3, False, 0),
    ],
)
def test_when_it_acts(method: str | None, threshold: float | None, filled: int, waits: bool, chosen: int) -> None:
    state = Staleness(buffer_entries=4, staleness=1)
    for record in state.start(0, "a"):
        state.apply(record)
    for prompt in range(8):
        record = state.reserve(version=0, data_epoch=0, prompt=prompt, instance="i")
        assert record is not None
        state.apply(record)
    for group in range(filled):
        for record in state.occupy(group, REF, 0.0, 1):
            state.apply(record)
    watch = StragglerWatch(method, threshold)
    found = watch.choose(state, 0 if waits else -1)
    assert found == list(range(filled, filled + chosen))
    assert watch.choose(state, 0 if waits else -1) == []


def test_how_samples_ended_is_counted_and_told_with_the_buffer() -> None:
    run, groups = redundant(2, 2, 0)
    run.tell("agent-loop-0", c.SampleEnds(ends=[("consumed", 5), ("consumed", 7), ("redundant", 30)]))
    run.finish(groups[0].group)
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    (buffer,) = of(run.finish(groups[1].group), c.Buffer)
    counted = {name: n for name, n in buffer.counters.items() if name.startswith(("samples/", "response_tokens/"))}
    assert counted == {
        "samples/launched": 8,
        "samples/consumed": 2,
        "response_tokens/consumed": 12,
        "samples/redundant": 1,
        "response_tokens/redundant": 30,
    }


def test_a_coordinator_restart_keeps_who_is_protected() -> None:
    run, groups = redundant(1, 2, 0)
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    run.finish(groups[1].group)
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    (again,) = assigned(run.pulled("instance-0", 1))
    assert again.prompt == groups[0].prompt
    state = Staleness(buffer_entries=1, redundant_entries=2, staleness=0, total_steps=4)
    source = PromptSource(num_prompts=100, seed=0, shuffle=False)
    for record in run.records:
        state.apply(record)
        source.apply(record)
    assert [r.protected for r in state.open_groups()] == [True]
    assert state.snapshot() == run.core.staleness.snapshot() and source.snapshot() == run.core.prompts.snapshot()
