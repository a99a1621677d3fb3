"""Buffers handed to the trainer chunk by chunk: in order, none twice, also across restarts of either side."""

from __future__ import annotations

import pytest
from coordinator_run import Run, assigned, of, restarted, started

from psrl.coordinator.records import ShortBuffer, Take
from psrl.protocol import control as c

pytestmark = pytest.mark.unit

BUFFER = {"buffer_entries": 4, "staleness": 0, "steps": 2}


def want(run: Run, taken: int, count: int, buffer: int = 0, incarnation: int = 0) -> list[c.Buffer]:
    message = c.WantBuffer(buffer=buffer, incarnation=incarnation, taken=taken, count=count)
    return of(run.tell("trainer-0", message), c.Buffer)


def shape(message: c.Buffer) -> tuple[int, list[int], bool]:
    return message.first, [group.group for group in message.groups], message.last


def takes(run: Run) -> list[list[int]]:
    return [record.groups for record in run.records if isinstance(record, Take)]


def test_a_chunk_ships_as_soon_as_its_groups_are_there() -> None:
    run, groups = started(**BUFFER)
    a, b, d, e = (g.group for g in groups)
    assert want(run, 0, 2) == []
    assert of(run.finish(d), c.Buffer) == []
    (first,) = of(run.finish(a), c.Buffer)
    assert shape(first) == (0, [d, a], False) and first.filled_s == -1.0
    assert of(run.finish(e), c.Buffer) == [], "nothing was asked for"
    assert want(run, 2, 2) == []
    run.now = 7.0
    (second,) = of(run.finish(b), c.Buffer)
    assert shape(second) == (2, [e, b], True) and second.filled_s == 7.0
    assert takes(run) == [[d, a], [e, b]]


def test_the_last_chunk_is_what_remains() -> None:
    run, groups = started(**BUFFER)
    for g in groups:
        run.finish(g.group)
    numbers = [g.group for g in groups]
    assert [shape(m) for m in want(run, 0, 3)] == [(0, numbers[:3], False)]
    assert [shape(m) for m in want(run, 3, 3)] == [(3, numbers[3:], True)]


def test_a_rest_without_a_count_waits_for_the_whole_buffer() -> None:
    run, groups = started(**BUFFER)
    for g in groups[:3]:
        run.finish(g.group)
    assert [shape(m)[2] for m in want(run, 0, 1)] == [False]
    assert want(run, 1, 0) == []
    (rest,) = of(run.finish(groups[3].group), c.Buffer)
    assert shape(rest) == (1, [g.group for g in groups[1:]], True)


def test_a_repeated_question_gets_the_same_chunk() -> None:
    run, groups = started(**BUFFER)
    for g in groups[:3]:
        run.finish(g.group)
    assert want(run, 0, 2) == want(run, 0, 2) != []
    assert want(run, 2, 2) == want(run, 2, 2) == []
    run.finish(groups[3].group)
    assert want(run, 2, 2) == want(run, 2, 2) != []
    assert want(run, 0, 2) == want(run, 0, 2) != [], "what was cut before can be had again"
    assert len(takes(run)) == 2


def test_a_new_coordinator_goes_on_in_the_middle_of_a_buffer() -> None:
    """Chunk 0 was answered, chunk 1 was cut but its answer was lost, chunk 2 is not there yet."""
    run, groups = started(**BUFFER)
    numbers = [g.group for g in groups]
    for number in numbers[:2]:
        run.finish(number)
    want(run, 0, 1)
    want(run, 1, 1)
    again = restarted(run, **BUFFER)
    state = c.TrainerState(published=0, resumed_from=0, start_nonce="a", wants=0, taken=1, count=1)
    (chunk,) = of(again.hello("trainer", "trainer-0", state), c.Buffer)
    assert shape(chunk) == (1, [numbers[1]], False)
    assert want(again, 2, 1) == []
    assert again.core.staleness.taken == 2


def test_a_new_trainer_gets_the_same_groups_in_the_same_order() -> None:
    run, groups = started(**BUFFER)
    order = [groups[i].group for i in (2, 0, 3)]
    for number in order:
        run.finish(number)
    assert [shape(m) for m in want(run, 0, 2)] == [(0, order[:2], False)]
    run.trainer(nonce="b")
    assert [shape(m) for m in want(run, 0, 2, incarnation=1)] == [(0, order[:2], False)]
    assert want(run, 2, 2, incarnation=1) == []
    (again,) = assigned(run.pulled("instance-0", 0, incarnation=1))
    assert again.prompt == groups[1].prompt
    (rest,) = of(run.finish(again.group), c.Buffer)
    assert shape(rest) == (2, [order[2], again.group], True)


def test_a_question_of_a_past_incarnation_is_ignored() -> None:
    run, groups = started(**BUFFER)
    run.finish(groups[0].group)
    assert want(run, 0, 1, incarnation=7) == [] and takes(run) == []


def test_a_drained_run_cuts_no_further_chunk() -> None:
    run, groups = started(**BUFFER)
    run.finish(groups[0].group)
    want(run, 0, 1)
    run.tell("supervisor", c.Drain(reason="SIGTERM", grace_s=30.0))
    run.finish(groups[1].group)
    assert want(run, 1, 1) == [] and len(takes(run)) == 1


@pytest.mark.parametrize("drop_last", [True, False])
def test_data_that_ends_inside_a_begun_buffer_ends_the_buffer(drop_last: bool) -> None:
    """3 prompts, buffers of 4, one group cut: two more come, then the buffer ends short; what was begun is not dropped."""
    run = Run(buffer_entries=4, staleness=0, steps=2, prompts=3, drop_last=drop_last)
    run.core.prompts.total_epochs = 1
    run.trainer()
    run.instance("instance-0")
    run.pulled("instance-0", 0)
    groups = [g.group for g in assigned(run.hello("agent_loop", "agent-loop-0", c.AgentState()))]
    assert len(groups) == 3
    run.finish(groups[0])
    assert [shape(m) for m in want(run, 0, 1)] == [(0, groups[:1], False)]
    run.finish(groups[1])
    run.finish(groups[2])
    assert [shape(m) for m in want(run, 1, 1)] == [(1, groups[1:2], False)]
    assert [shape(m) for m in want(run, 2, 2)] == [(2, groups[2:], True)]
    assert ShortBuffer(0, 3) in run.records
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    assert [shape(m) for m in want(run, 0, 1, buffer=1)] == [(0, [], True)]


def test_a_buffer_that_ends_with_what_was_cut_says_so() -> None:
    run = Run(buffer_entries=4, staleness=0, steps=2, prompts=2)
    run.core.prompts.total_epochs = 1
    run.trainer()
    run.instance("instance-0")
    run.pulled("instance-0", 0)
    groups = [g.group for g in assigned(run.hello("agent_loop", "agent-loop-0", c.AgentState()))]
    run.finish(groups[0])
    want(run, 0, 1)
    run.tell("agent-loop-0", c.GroupFailed(group=groups[1], reason="error", detail="", retry=False))
    assert [shape(m) for m in want(run, 1, 2)] == [(1, [], True)]
    assert run.core.staleness.is_taken(0)


def test_a_trainer_with_more_than_the_ledger_ends_the_run() -> None:
    run, _ = started(**BUFFER)
    want(run, 3, 1)
    assert run.core.ended is not None and "has 3 groups of buffer 0, the ledger cut 0" in run.core.ended.cause
