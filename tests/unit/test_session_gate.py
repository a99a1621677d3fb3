"""Single sessions at the gate, as the coordinator's messages show it."""

from __future__ import annotations

import pytest
from coordinator_run import Run, assigned, of

from psrl.coordinator.placing import PlacingSettings, PromptFacts
from psrl.coordinator.sessions.settings import SessionSettings
from psrl.protocol import control as c
from psrl.protocol.generation import TURN, EngineStats

pytestmark = pytest.mark.unit

AGENT = "agent-loop-0"
PROMPT = 100


def begun(*, capacity: int = 1000, sticky: bool = True, groups: int = 2, instances: int = 1, **changes) -> Run:
    """`groups` groups of one sample each, dealt to the instances in turn; each has a prompt of 100 tokens."""
    thunder = {k: changes.pop(k) for k in ("scope", "force_pin", "env_token_weight") if k in changes}
    run = Run(
        buffer_entries=groups,
        staleness=0,
        samples_per_group=1,
        placing=PlacingSettings(trajectory_sticky=sticky),
        sessions=SessionSettings(buffer_per_session=0, **thunder),
        **changes,
    )
    run.core.facts = lambda prompt: PromptFacts(PROMPT)
    run.trainer(wants=0)
    for n in range(instances):
        run.instance(f"i{n}")
        report(run, f"i{n}", capacity)
        run.pulled(f"i{n}", 0)
    first = assigned(run.hello("agent_loop", AGENT, c.AgentState()))
    assert [a.instance for a in first] == [f"i{n % instances}" for n in range(groups)]
    return run


def report(run: Run, name: str, capacity: int, **stats) -> list:
    return run.tell(name, c.InstanceStatus(stats=EngineStats(kv_capacity_tokens=capacity, **stats)))


def ends(run: Run, group: int, tokens: int, instance: str = "i0") -> list:
    """The turn ends and the session goes to its environment."""
    left = c.SampleMoves(left=[(group, instance, 1)])
    return run.tell(AGENT, left, c.TurnsEnded(away=[(group, 0, instance, tokens)]))


def comes_back(run: Run, group: int, tokens: int, instance: str = "i0") -> list[tuple[int, str]]:
    """(group, instance) of all that go on now."""
    request = c.RouteRequest(samples=[(group, 0)], reason=TURN, instance=instance, tokens=[tokens - PROMPT])
    return went_on(run.tell(AGENT, request))


def is_over(run: Run, group: int, instance: str = "i0") -> list[tuple[int, str]]:
    over = c.TurnsEnded(over=[(group, 0, instance)])
    return went_on(run.tell(AGENT, c.SampleMoves(left=[(group, instance, 1)]), over))


def went_on(said: list) -> list[tuple[int, str]]:
    return [(group, instance) for m in of(said, c.Routed) for group, _, instance in m.samples]


def test_a_session_that_fits_goes_on_where_it_was() -> None:
    run = begun(instances=2, groups=2)
    ends(run, 1, 300, "i1")
    ends(run, 0, 200, "i0")
    assert comes_back(run, 1, 350, "i1") == [(1, "i1")]
    assert comes_back(run, 0, 250, "i0") == [(0, "i0")]
    assert run.core.counters["sessions/away"] == 2 and run.core.counters["sessions/hung"] == 0


def test_who_is_away_hangs_when_others_grow_and_goes_on_when_they_are_over() -> None:
    run = begun(groups=2)
    ends(run, 0, 400)
    ends(run, 1, 500)
    assert comes_back(run, 1, 700) == [(1, "i0")], "700 + 400 are too many: the one at its environment gave way"
    assert run.core.counters["sessions/hung"] == 1
    assert comes_back(run, 0, 400) == []
    assert is_over(run, 1) == [(0, "i0")]
    assert run.core.counters["sessions/continued"] == 1


def test_a_session_that_generates_is_not_touched_and_hangs_when_its_turn_ends() -> None:
    run = begun(groups=2)
    ends(run, 0, 600)
    assert comes_back(run, 0, 600) == [(0, "i0")]
    assert report(run, "i0", 1000, kv_tokens=1100) == [], "both generate: nobody is told anything"
    ends(run, 1, 450)  # the smaller one was marked
    assert run.core.counters["sessions/hung"] == 1
    assert comes_back(run, 1, 450) == []
    ends(run, 0, 650)
    assert comes_back(run, 0, 650) == [(0, "i0")]
    assert is_over(run, 0) == [(1, "i0")]


def test_the_smallest_goes_on_first_and_each_as_soon_as_it_fits() -> None:
    run = begun(groups=4)
    for group, tokens in ((1, 300), (2, 250), (3, 350)):
        ends(run, group, tokens)
    ends(run, 0, 100)
    assert comes_back(run, 0, 950) == [(0, "i0")], "all others hang"
    assert [comes_back(run, group, tokens) for group, tokens in ((1, 300), (2, 250), (3, 350))] == [[], [], []]
    assert is_over(run, 0) == [(2, "i0"), (1, "i0"), (3, "i0")]


def test_a_session_larger_than_the_cache_goes_on_once_nobody_is_there() -> None:
    run = begun(groups=2)
    ends(run, 0, 400)
    assert comes_back(run, 0, 1200) == []
    assert is_over(run, 1) == [(0, "i0")]
    assert run.core.counters["sessions/forced"] == 1


def test_room_is_kept_again_for_a_session_that_is_still_away() -> None:
    run = begun(groups=2)
    ends(run, 0, 400)
    ends(run, 1, 500)
    comes_back(run, 1, 700)
    is_over(run, 1)
    assert run.core.counters["sessions/continued"] == 1, "nobody waits, and it fits again"
    assert comes_back(run, 0, 400) == [(0, "i0")]


def test_a_session_whose_kv_is_kept_waits_for_a_free_place_there() -> None:
    run = begun(instances=2, groups=3, max_concurrent=2)
    ends(run, 0, 200, "i0")
    run.tell(AGENT, c.RouteRequest(samples=[(1, 0)], reason="migrated", instance="i1", tokens=[0]))
    assert comes_back(run, 0, 250) == [], "i0 has two samples now, i1 none"
    assert is_over(run, 2) == [(0, "i0")]


def test_a_session_whose_instance_is_gone_goes_on_elsewhere() -> None:
    run = begun(instances=2, groups=3)
    ends(run, 0, 200, "i0")
    run.core.lost("i0", "killed", run.now)
    run.settle()
    assert comes_back(run, 0, 250) == [(0, "i1")]


def test_a_session_whose_instance_leaves_goes_on_elsewhere() -> None:
    run = begun(instances=2, groups=3)
    ends(run, 0, 200, "i0")
    run.tell("node", c.Leave(children=["i0"], reason="preempted", grace_s=30.0))
    assert comes_back(run, 0, 250) == [(0, "i1")]


def test_with_the_global_scope_a_hung_session_goes_where_it_fits_best() -> None:
    run = begun(instances=2, groups=3, sticky=False, scope="global")
    ends(run, 0, 400, "i0")
    ends(run, 2, 300, "i0")
    ends(run, 1, 450, "i1")
    assert comes_back(run, 2, 850, "i0") == [(2, "i0")], "the other one at i0 hangs"
    assert comes_back(run, 0, 400, "i0") == [(0, "i1")]


@pytest.mark.parametrize(("pin", "after"), [(True, "i1"), (False, "i0")])
def test_a_session_that_was_hung_is_pinned_to_where_it_went_on(pin, after) -> None:
    run = begun(instances=2, groups=3, sticky=False, scope="global", force_pin=pin)
    ends(run, 0, 400, "i0")
    ends(run, 2, 300, "i0")
    ends(run, 1, 450, "i1")
    comes_back(run, 2, 850, "i0")
    assert comes_back(run, 0, 400, "i0") == [(0, "i1")]
    is_over(run, 2, "i0")  # nobody is at i0 now, one session generates at i1
    assert comes_back(run, 1, 450, "i1") == [(1, "i0")]
    is_over(run, 1, "i0")
    ends(run, 0, 420, "i1")
    assert comes_back(run, 0, 420, "i1") == [(0, after)]


@pytest.mark.parametrize(("weight", "hung"), [(1.0, 1), (0.5, 0), (0.0, 0)])
def test_who_is_away_counts_by_its_weight(weight, hung) -> None:
    run = begun(groups=2, env_token_weight=weight)
    ends(run, 0, 400)
    ends(run, 1, 500)
    comes_back(run, 1, 700)
    assert run.core.counters["sessions/hung"] == hung
    assert comes_back(run, 0, 400) == [], "when it generates it counts whole: 700 + 400"
    assert is_over(run, 1) == [(0, "i0")]


def test_a_new_group_does_not_begin_where_it_does_not_fit() -> None:
    run = begun(capacity=250, groups=2)  # two prompts of 100
    ends(run, 0, 200)
    said = run.tell(
        AGENT, c.TurnsEnded(over=[(1, 0, "i0")]), c.GroupFailed(group=1, reason="error", detail="", retry=True)
    )
    assert assigned(said) == [], "200 + 100 are more than 250"
    said = run.tell(AGENT, c.GroupFailed(group=0, reason="error", detail="", retry=True))
    assert len(assigned(said)) == 2


def test_a_group_that_is_closed_leaves_nothing_behind() -> None:
    run = begun(groups=2)
    ends(run, 0, 400)
    comes_back(run, 1, 700)
    assert run.core.gate is not None
    run.tell(AGENT, c.GroupFailed(group=0, reason="error", detail="", retry=False))
    run.tell(AGENT, c.GroupFailed(group=1, reason="error", detail="", retry=False))
    known = {session.group for session in run.core.gate.table}
    assert known == set(run.core.placement.groups), "of the old ones none, of the new ones all"
    run.core.gate.table.check()


def test_a_place_that_was_given_up_unused_is_kept_for_the_prompt() -> None:
    run = begun(groups=2)
    ends(run, 0, 0)
    assert run.core.gate is not None
    assert run.core.gate.table.place("i0").account.remaining == 800
    assert comes_back(run, 0, PROMPT) == [(0, "i0")]


def test_without_the_strategy_a_turn_goes_back_to_where_it_was() -> None:
    run = Run(buffer_entries=2, staleness=0, samples_per_group=1, placing=PlacingSettings(trajectory_sticky=True))
    run.trainer()
    for name in ("i0", "i1"):
        run.instance(name)
        run.pulled(name, 0)
    run.hello("agent_loop", AGENT, c.AgentState())
    ends(run, 1, 0, "i1")
    assert run.core.counters["sessions/away"] == 1
    assert comes_back(run, 1, PROMPT, "i1") == [(1, "i1")]
