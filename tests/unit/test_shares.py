"""Instances take new weights one after the other; who is first leaves the others their share of what begins."""

from __future__ import annotations

from collections import Counter

import pytest
from coordinator_run import Run, assigned, started

from psrl.coordinator.placing import PlacingSettings
from psrl.protocol import control as c

pytestmark = pytest.mark.unit

PATIENCE_S = PlacingSettings().patience_s


def beginning(instances: int, **kwargs) -> Run:
    """A trainer that has published version 0, `instances` that pull it, an agent loop; eight groups may begin."""
    run = Run(buffer_entries=4, **kwargs)
    run.trainer()
    for number in range(instances):
        run.instance(f"instance-{number}")
    run.hello("agent_loop", "agent-loop-0", c.AgentState())
    return run


def at(groups: list[c.Assignment]) -> Counter[str]:
    return Counter(group.instance for group in groups)


def test_the_first_to_have_new_weights_gets_its_share_and_the_others_find_theirs() -> None:
    run = beginning(4)
    for name in ("instance-2", "instance-0", "instance-3", "instance-1"):
        assert at(assigned(run.pulled(name, 0))) == {name: 2}


def test_what_is_in_flight_counts_for_the_share() -> None:
    """Staleness 1, buffers of 2: at version 0 four groups begin. Two end, version 1 opens two places more."""
    run, groups = started()
    here = {name: [g.group for g in groups if g.instance == name] for name in ("instance-0", "instance-1")}
    assert {name: len(own) for name, own in here.items()} == {"instance-0": 2, "instance-1": 2}
    for group in here["instance-1"]:
        run.finish(group)
        run.tell("agent-loop-0", c.SampleMoves(left=[(group, "instance-1", 4)]))
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    assert assigned(run.pulled("instance-0", 1)) == []  # it has two of the four
    assert at(assigned(run.pulled("instance-1", 1))) == {"instance-1": 2}


def test_one_that_is_awaited_too_long_leaves_its_share_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    run = beginning(2)
    assert len(assigned(run.pulled("instance-0", 0))) == 4
    assert run.core.next_look_s == PATIENCE_S
    run.now = PATIENCE_S - 0.01
    assert assigned(run.settle()) == []
    run.now = PATIENCE_S
    with caplog.at_level("INFO", "psrl.coordinator"):
        assert at(assigned(run.settle())) == {"instance-0": 4}
    assert "new groups go to others: 1 instances are not ready after 30 s" in caplog.text
    assert run.core.next_look_s > 1e9


@pytest.mark.parametrize("how", ["dies", "fails", "leaves"])
def test_nobody_is_kept_waiting_for_one_that_will_not_take_them(how: str) -> None:
    run = beginning(2)
    assert len(assigned(run.pulled("instance-0", 0))) == 4
    if how == "dies":
        run.core.lost("instance-1", "SIGKILL", run.now)
        said = run.settle()
    elif how == "fails":
        said = run.tell("instance-1", c.PullFailed(version=0, cause="the trainer is silent"))
    else:
        run.hello("supervisor", "node-1", c.SupervisorState())
        said = run.tell("node-1", c.Leave(children=["instance-1"], reason="time is over", grace_s=60.0))
    assert at(assigned(said)) == {"instance-0": 4}


def test_those_that_have_not_come_yet_are_awaited_once() -> None:
    run = beginning(1, num_instances=2)
    assert len(assigned(run.pulled("instance-0", 0))) == 4
    run.now = PATIENCE_S
    groups = assigned(run.settle())
    assert len(groups) == 4
    run.finish(groups[0].group)
    for group in groups[1:]:
        run.finish(group.group)
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    assert len(assigned(run.pulled("instance-0", 1))) == 4


def test_one_that_comes_late_finds_its_share() -> None:
    run = beginning(1, num_instances=2)
    assert at(assigned(run.pulled("instance-0", 0))) == {"instance-0": 4}
    assert assigned(run.instance("instance-1")) == []
    assert at(assigned(run.pulled("instance-1", 0))) == {"instance-1": 4}


def test_single_samples_still_go_where_the_share_is_reached() -> None:
    run = beginning(2)
    groups = assigned(run.pulled("instance-0", 0))
    run.tell("agent-loop-0", c.SampleMoves(left=[(groups[0].group, "instance-0", 1)]))
    said = run.tell("agent-loop-0", c.RouteRequest(samples=[(groups[0].group, 0)], instance="instance-0"))
    assert [m.samples for _, m in said if isinstance(m, c.Routed)] == [[(groups[0].group, 0, "instance-0")]]
