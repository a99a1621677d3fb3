"""Samples on the move: their order, their stickiness, and that none is lost, doubled or passed over for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from coordinator_run import Run, assigned, of, started
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_methods import METHODS, QWEN_7B

from psrl.coordinator.core import Coordinator
from psrl.coordinator.placing import PlacingSettings, PromptFacts
from psrl.coordinator.routing.base import Router
from psrl.coordinator.routing.throughput_optimal import ThroughputOptimal
from psrl.coordinator.waiting import Waiting, WaitingQueue
from psrl.protocol import control as c
from psrl.protocol.generation import EngineStats

pytestmark = pytest.mark.unit

AGENT = "agent-loop-0"


def waiting(group: int, sample: int = 0, version: int = 0, tokens: int = 0, since_s: float = 0.0) -> Waiting:
    return Waiting(agent="a", group=group, sample=sample, version=version, tokens=tokens, since_s=since_s)


def drained(queue: WaitingQueue, below: float = 99, waiting_since_s: float = -1.0) -> list[int]:
    order = []
    while first := queue.first(below=below, waiting_since_s=waiting_since_s):
        queue.remove(first)
        order.append(first.group)
    return order


# ---- the queue -------------------------------------------------------------------------------------------------------

# (group, version, tokens), in the order of asking
ASKED = [(5, 1, 30), (3, 2, 10), (4, 1, 20), (1, 2, 40), (2, 3, 10)]


@pytest.mark.parametrize(
    ("sort", "oldest_version_first", "order"),
    [
        ("small_id", False, [1, 2, 3, 4, 5]),
        ("short_length", False, [3, 2, 4, 5, 1]),
        ("long_length", False, [1, 5, 4, 3, 2]),
        ("small_id", True, [4, 5, 1, 3, 2]),
        ("long_length", True, [5, 4, 1, 3, 2]),
    ],
)
def test_the_order_of_waiting_samples(sort: str, oldest_version_first: bool, order: list[int]) -> None:
    queue = WaitingQueue(sort, oldest_version_first)
    for group, version, tokens in ASKED:
        queue.add(waiting(group, version=version, tokens=tokens))
    assert drained(queue) == order and len(queue) == 0


def test_only_versions_below_the_closed_ones_are_offered() -> None:
    queue = WaitingQueue()
    for group, version, tokens in ASKED:
        queue.add(waiting(group, version=version, tokens=tokens))
    assert drained(queue, below=2) == [4, 5]
    assert drained(queue, below=3) == [1, 3]
    assert len(queue) == 1


def test_who_has_waited_long_enough_is_first_whatever_the_order() -> None:
    queue = WaitingQueue("short_length", oldest_version_first=True)
    queue.add(waiting(1, version=3, tokens=900, since_s=0.0))
    queue.add(waiting(2, version=3, tokens=800, since_s=1.0))
    queue.add(waiting(3, version=1, tokens=5, since_s=9.0))
    assert queue.first(below=99, waiting_since_s=-0.1).group == 3
    assert drained(queue, waiting_since_s=1.0) == [1, 2, 3]


def test_asking_again_replaces_the_question_but_not_the_time_waited() -> None:
    queue = WaitingQueue("long_length")
    queue.add(waiting(1, tokens=5, since_s=1.0))
    queue.add(waiting(2, tokens=6, since_s=2.0))
    queue.add(waiting(1, tokens=7, since_s=3.0))
    assert len(queue) == 2
    first = queue.first(below=1, waiting_since_s=-1.0)
    assert (first.group, first.tokens, first.since_s) == (1, 7, 1.0)


@settings(max_examples=100)
@given(
    st.sampled_from(["small_id", "short_length", "long_length"]),
    st.booleans(),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 2), st.integers(0, 3), st.integers(0, 50))),
)
def test_the_queue_holds_each_sample_once_until_it_is_removed(sort, oldest_version_first, steps) -> None:
    queue, held = WaitingQueue(sort, oldest_version_first), {}
    for now, (add, group, sample, version, tokens) in enumerate(steps):
        if add:
            held[group, sample] = waiting(group, sample, group % 4, tokens, float(now))
            queue.add(held[group, sample])
        elif first := queue.first(below=version + 1, waiting_since_s=now - 10.0):
            assert held.pop((first.group, first.sample)) is first and first.version <= version
            queue.remove(first)
        else:
            assert all(w.version > version for w in held.values())
        assert len(queue) == len(held) and {(w.group, w.sample) for w in queue} == held.keys()


# ---- in the coordinator ----------------------------------------------------------------------------------------------


def sticky_run(**placing) -> tuple[Run, list[c.Assignment]]:
    return started(placing=PlacingSettings(**placing))


def back(run: Run, group: int, samples: list[int], instance: str, reason: str = "abort") -> dict[int, str]:
    """These samples leave `instance` and ask; where they are sent, by sample."""
    moves = c.SampleMoves(left=[(group, instance, len(samples))])
    request = c.RouteRequest(
        samples=[(group, s) for s in samples], reason=reason, instance=instance, tokens=[5] * len(samples)
    )
    return {s: name for m in of(run.tell(AGENT, moves, request), c.Routed) for _, s, name in m.samples}


@pytest.mark.parametrize(
    ("placing", "reason", "same"),
    [
        ({}, "abort", False),
        ({"trajectory_sticky": True}, "abort", True),
        ({"group_sticky": True}, "abort", True),
        ({"trajectory_sticky": True}, "migrated", False),
        ({"group_sticky": True}, "migrated", False),
        ({"group_sticky": True, "trajectory_sticky": True}, "preempted", False),
    ],
)
def test_stickiness_brings_a_sample_back_unless_it_was_moved_away(placing: dict, reason: str, same: bool) -> None:
    """Both instances have 8 samples. Of group 0 one leaves, of the other instance's groups two do: it is less busy."""
    run, groups = sticky_run(**placing)
    here = groups[0].instance
    other = next(g for g in groups if g.instance != here)
    run.tell(AGENT, c.SampleMoves(left=[(other.group, other.instance, 3)]))
    assert back(run, groups[0].group, [1], here, reason) == {1: here if same else other.instance}


def test_what_an_engine_had_no_room_for_comes_back_as_others_leave() -> None:
    """Two instances for 8 samples each, both full. One hands back three: it holds five. Each sample that leaves makes room for
    itself and, in case the cache can hold more, for one more."""
    run, groups = started(max_concurrent=8)
    here, group = groups[0].instance, groups[0].group
    mate = next(g for g in groups[1:] if g.instance == here)
    assert back(run, group, [0, 1, 2], here, "preempted") == {}
    said = of(run.tell(AGENT, c.SampleMoves(left=[(mate.group, here, 1)])), c.Routed)
    assert [(s, name) for m in said for _, s, name in m.samples] == [(0, here), (1, here)]
    said = of(run.tell(AGENT, c.SampleMoves(left=[(mate.group, here, 3)])), c.Routed)
    assert [(s, name) for m in said for _, s, name in m.samples] == [(2, here)]


def test_a_group_whose_samples_are_all_on_the_move_stays_together() -> None:
    for group_sticky in (True, False):
        run, groups = sticky_run(group_sticky=group_sticky)
        here = groups[0].instance
        other = next(g for g in groups if g.instance != here)
        run.tell(AGENT, c.SampleMoves(left=[(other.group, other.instance, 4)]))  # both have 4 without the group
        places = back(run, groups[0].group, [0, 1, 2, 3], here).values()
        assert len(places) == 4 and len(set(places)) == (1 if group_sticky else 2)


@pytest.mark.parametrize(
    "gone",
    [
        lambda run, name: run.core.lost(name, "killed", run.now),
        lambda run, name: setattr(run.core.placement.instances[name], "draining", True),
        lambda run, name: setattr(run.core.placement.instances[name], "leaving", True),
        lambda run, name: setattr(run.core.placement.instances[name], "version", -1),
        lambda run, name: setattr(run.core.placement.instances[name], "stats", EngineStats(waiting=2)),
    ],
)
def test_stickiness_waits_for_no_instance_that_may_not_take_the_sample(gone) -> None:
    run, groups = sticky_run(group_sticky=True, trajectory_sticky=True)
    here = groups[0].instance
    gone(run, here)
    [(sample, name)] = back(run, groups[0].group, [2], here).items()
    assert sample == 2 and name != here


def test_older_versions_first_and_longest_first_reach_the_router() -> None:
    run, groups = started(placing=PlacingSettings(sort="long_length"), max_concurrent=8)
    for name in ("instance-0", "instance-1"):  # both are full: 8 samples each
        assert run.core.placement.instances[name].in_flight == 8
    group = groups[0]
    for sample, tokens in ((0, 10), (1, 30), (2, 20)):
        assert not of(run.tell(AGENT, c.RouteRequest(samples=[(group.group, sample)], tokens=[tokens])), c.Routed)
    said = run.tell(AGENT, c.SampleMoves(left=[(groups[1].group, groups[1].instance, 2)]))
    assert [s for m in of(said, c.Routed) for _, s, _ in m.samples] == [1, 2]


def test_a_sample_that_finds_no_place_lets_new_groups_have_older_weights_only() -> None:
    run, groups = started(max_concurrent=8, staleness=3, steps=8)
    for g in groups[:2]:
        run.finish(g.group)
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    run.pulled("instance-0", 1)
    at = {
        name: [n for n, g in run.core.placement.groups.items() if name in g.on] for name in ("instance-0", "instance-1")
    }
    assert {name: len(numbers) for name, numbers in at.items()} == {"instance-0": 2, "instance-1": 2}  # both full
    [new] = assigned(run.finish(at["instance-0"][0]))
    assert (new.version, new.instance) == (1, "instance-0")
    assert not of(run.tell(AGENT, c.RouteRequest(samples=[(new.group, 0)])), c.Routed)
    said = run.finish(at["instance-1"][0])
    assert [(g.version, g.instance) for g in assigned(said)] == [(0, "instance-1")] and not of(said, c.Routed)
    said = run.finish(at["instance-0"][1])
    assert [m.samples for m in of(said, c.Routed)] == [[(new.group, 0, "instance-0")]]
    assert not assigned(said)  # 3 places are left there


def test_asking_twice_is_answered_once() -> None:
    run, groups = started(max_concurrent=8)
    group = groups[0]
    request = c.RouteRequest(samples=[(group.group, 0)])
    run.tell(AGENT, request)
    run.tell(AGENT, request)
    said = run.tell(AGENT, c.SampleMoves(left=[(groups[1].group, groups[1].instance, 4)]))
    assert sum(len(m.samples) for m in of(said, c.Routed)) == 1


def test_what_an_agent_loop_asked_before_it_said_hello_again_is_forgotten() -> None:
    run, groups = started(max_concurrent=8)
    run.tell(AGENT, c.RouteRequest(samples=[(groups[0].group, 0)]))
    held = [c.HeldGroup(group=g.group, on={g.instance: 4}) for g in groups]
    run.hello("agent_loop", AGENT, c.AgentState(held=held))
    assert len(run.core.waiting_routes) == 0
    assert not of(run.tell(AGENT, c.SampleMoves(left=[(groups[0].group, groups[0].instance, 1)])), c.Routed)


def test_held_back_samples_go_after_sixty_check_intervals_at_the_latest() -> None:
    run, groups = started(placing=PlacingSettings(check_interval_s=0.5))
    run = with_router(run, ThroughputOptimal(QWEN_7B, 1.0))  # only an empty instance is good enough
    run.tell(AGENT, c.RouteRequest(samples=[(groups[0].group, 0)], tokens=[100]))
    for run.now in (10.0, 29.9):
        assert not of(run.settle(), c.Routed)
    run.now = 30.0
    assert [s for m in of(run.settle(), c.Routed) for _, s, _ in m.samples] == [0]


def with_router(run: Run, router: Router) -> Run:
    """The same state under another method."""
    old = run.core
    run.core = Coordinator(
        old.settings, old.staleness, old.prompts, router, 1, run.now, lambda p: PromptFacts(100, "math", (p,))
    )
    run.trainer()
    for name in ("instance-0", "instance-1"):
        run.instance(name, version=0)
    held = [c.HeldGroup(group=g.group, on={g.instance: 4}) for g in old.staleness.open_groups()]
    run.hello("agent_loop", AGENT, c.AgentState(held=held))
    return run


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7), st.integers(0, 3)), max_size=40))
def test_no_sample_is_lost_or_in_two_places(method: str, steps: list[tuple[int, int, int]]) -> None:
    """An agent loop's own book of where its samples are, against the coordinator, through aborts, deaths and returns."""
    placing = PlacingSettings(group_sticky=bool(len(steps) % 2), trajectory_sticky=bool(len(steps) % 3))
    run, _ = started(placing=placing, max_concurrent=9, staleness=1)
    run = with_router(run, METHODS[method]())
    where: dict[tuple[int, int], str] = {}
    for number, group in run.core.placement.groups.items():
        where |= {(number, s): next(iter(group.on)) for s in range(4)}
    alive = Counter({"instance-0": 1, "instance-1": 1})

    def hear(said) -> None:
        for a in assigned(said):
            where.update({(a.group, s): a.instance for s in range(4)})
        for m in of(said, c.Routed):
            for group, sample, name in m.samples:
                assert where[group, sample] == "" and alive[name]
                where[group, sample] = name

    for what, which, amount in steps:
        name = f"instance-{which % 2}"
        run.now += 1.0
        if what < 6:  # an instance hands back some of its samples
            there = [key for key, at in where.items() if at == name][: amount + 1]
            for key in there:
                where[key] = ""
            moves = [(group, name, 1) for group, _ in there]
            reason = "migrated" if what % 2 else "abort"
            hear(run.tell(AGENT, c.SampleMoves(left=moves)))
            request = c.RouteRequest(samples=there, reason=reason, instance=name, tokens=[10 * which] * len(there))
            hear(run.tell(AGENT, request))
        elif what == 6 and alive[name]:
            alive[name] = 0
            run.core.lost(name, "killed", run.now)
            lost = [key for key, at in where.items() if at == name]
            for key in lost:
                where[key] = ""
            hear(run.tell(AGENT, c.RouteRequest(samples=lost)))
        elif what == 7 and not alive[name]:
            alive[name] = 1
            hear(run.instance(name, version=0))
        elif what == 8:
            hear(run.tell(name, c.InstanceStatus(stats=EngineStats(waiting=amount % 2, kv_tokens=100 * amount))))
        else:
            hear(run.settle())
    for name in alive:
        if not alive[name]:
            alive[name] = 1
            hear(run.instance(name, version=0))
        hear(run.tell(name, c.InstanceStatus(stats=EngineStats())))
    run.now += 60.0
    hear(run.settle())
    assert all(where.values()) and len(run.core.waiting_routes) == 0
    for name, view in run.core.placement.instances.items():
        assert view.in_flight == sum(at == name for at in where.values()) <= 9
