"""Joining a running run and leaving it again: the coordinator's decisions, message by message."""

from __future__ import annotations

import pytest
from coordinator_run import SETTINGS, Run, assigned, of, restarted, started

from psrl.coordinator.core import CLAIM_GRACE_S
from psrl.coordinator.joiners import REFUSED
from psrl.protocol import control as c

pytestmark = pytest.mark.unit

JOINER = "join-7-0-0"
JOINED = "instance-join-7-0-0-0"


def down(name: str, role: str = "instance", *, restarting: bool = False) -> c.ChildDown:
    return c.ChildDown(role=role, name=name, cause="signal SIGKILL", restarting=restarting, pid=1)


def leave(*children: str) -> c.Leave:
    return c.Leave(children=list(children), reason="SIGTERM", grace_s=30.0)


def to(said: list[tuple[str, c.Message]], name: str) -> list[c.Message]:
    return [message for receiver, message in said if receiver == name]


def joined(run: Run, *children: str) -> list[tuple[str, c.Message]]:
    return run.hello("supervisor", JOINER, c.SupervisorState(children=list(children), joined=True))


def with_joiner(**kwargs) -> tuple[Run, list[c.Assignment]]:
    """Trainer, one core instance and a joined one, both with version 0, one agent loop: the first assignments."""
    run = Run(**({"num_instances": 1} | kwargs))
    run.hello("supervisor", "node-0", c.SupervisorState(children=["instance-0"]))
    run.trainer()
    joined(run, JOINED)
    for name in ("instance-0", JOINED):
        run.instance(name)
        run.pulled(name, 0)
    return run, assigned(run.hello("agent_loop", "agent-loop-0", c.AgentState()))


def test_a_joined_instance_gets_its_share() -> None:
    _, groups = with_joiner()
    assert sorted(g.instance for g in groups) == ["instance-0", "instance-0", JOINED, JOINED]


def test_a_leaving_instance_gets_nothing_new_and_goes_when_all_of_it_has_been_taken_over() -> None:
    run, groups = with_joiner()
    there = [g.group for g in groups if g.instance == JOINED]
    said = run.tell(JOINER, leave(JOINED))
    assert [type(m) for m in to(said, JOINED)] == [c.Retire]
    # What comes back goes to the others, what is on its way there is refused and comes back too.
    said = run.tell(
        "agent-loop-0",
        c.SampleMoves(left=[(there[0], JOINED, 4)]),
        c.RouteRequest(samples=[(there[0], s) for s in range(4)]),
    )
    assert {instance for m in of(said, c.Routed) for _, _, instance in m.samples} == {"instance-0"}
    assert of(said, c.Dismissed) == []
    said = run.tell("agent-loop-0", c.SampleMoves(left=[(there[1], JOINED, 4)]))
    assert [type(m) for m in to(said, JOINED)] == [c.Dismissed]
    (told,) = of(said, c.Instances)
    assert {i.name: i.alive for i in told.instances} == {JOINED: False, "instance-0": True}
    # Its goodbye, its end and its supervisor's are no news any more.
    run.tell(JOINED, c.Leaving(reason="leaving"))
    run.core.lost(JOINER, "its connection is gone", run.now)
    run.core.tick(run.now + 10 * SETTINGS.missing_timeout_s)
    assert run.core.ended is None and run.core.missing == {} and run.core.joined == {} and run.core.leaving == set()
    run.finish(groups[0].group)
    said = run.finish(there[0])
    assert of(said, c.Instances) == [] and {g.instance for g in assigned(said)} <= {"instance-0"}


def test_a_leaving_instance_pulls_no_more() -> None:
    run, groups = with_joiner()
    run.tell(JOINER, leave(JOINED))
    for g in groups[:2]:
        run.finish(g.group)
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    said = run.tell("trainer-0", c.Published(version=1, incarnation=0))
    assert [name for name, m in said if isinstance(m, c.Pull)] == ["instance-0"]


def test_an_instance_that_was_still_starting_leaves_at_its_first_word() -> None:
    run, _ = started(num_instances=2)
    joined(run, JOINED)
    assert run.tell(JOINER, leave(JOINED)) == []
    said = run.instance(JOINED)
    assert [type(m) for m in to(said, JOINED)] == [c.Welcome, c.Retire, c.Dismissed]


def test_an_instance_retires_across_a_coordinator_restart() -> None:
    run, _ = with_joiner()
    again = restarted(run)
    state = c.InstanceState(endpoint="tcp://a", version=0, incarnation=0, max_concurrent=64, retiring=True)
    again.trainer()
    said = again.hello("instance", JOINED, state)
    assert of(said, c.Pull) == [] and [type(m) for m in to(said, JOINED)] == [c.Welcome, c.Dismissed]


def test_a_leaving_agent_loop_gets_nothing_new_and_its_groups_return_to_the_queue() -> None:
    run, groups = started()
    loop = "agent-loop-join-7-0-0-0"
    joined(run, loop)
    run.hello("agent_loop", loop, c.AgentState())
    run.tell("agent-loop-0", c.GroupFailed(group=groups[0].group, reason="error", detail="", retry=True))
    held = run.core.placement.held_by(loop)
    assert len(held) == 1
    said = run.tell(JOINER, leave(loop))
    assert [type(m) for m in to(said, loop)] == [c.Retire]
    said = run.tell("agent-loop-0", c.GroupFailed(group=groups[1].group, reason="error", detail="", retry=True))
    assert [name for name, m in said if isinstance(m, c.Assign)] == ["agent-loop-0"]
    again = run.tell(loop, c.Leaving(reason="leaving"))
    assert [name for name, m in again if isinstance(m, c.Assign)] == ["agent-loop-0"]
    assert run.core.ended is None and list(run.core.placement.agents) == ["agent-loop-0"]


def test_the_loss_of_a_joiner_with_all_it_has_is_no_reason_to_end_the_run() -> None:
    run, groups = with_joiner()
    for name in (JOINER, JOINED):
        run.core.lost(name, "its connection is gone", run.now)
    run.core.tick(run.now + 10 * SETTINGS.missing_timeout_s)
    assert run.core.ended is None
    there = next(g.group for g in groups if g.instance == JOINED)
    (routed,) = of(run.tell("agent-loop-0", c.RouteRequest(samples=[(there, 0)])), c.Routed)
    assert routed.samples == [(there, 0, "instance-0")]


def test_children_of_a_joiner_count_for_the_log_only() -> None:
    run, _ = with_joiner()
    for _ in range(3):
        run.tell(JOINER, down(JOINED))
    run.hello("supervisor", JOINER, c.SupervisorState(gone=[down(JOINED)], joined=True))
    run.core.tick(run.now)
    assert run.core.ended is None and run.core.counters["deaths/instance"] == 3


@pytest.mark.parametrize("end", ["its supervisor is lost", "it leaves", "its restarts are used up"])
def test_the_run_outlives_its_own_instances_as_long_as_a_joined_one_is_there(end: str) -> None:
    run, groups = with_joiner()
    run.tell("node-0", down("instance-0"))
    run.core.tick(run.now)
    assert run.core.ended is None
    run.tell(JOINER, down(JOINED, restarting=True))
    run.core.tick(run.now)
    assert run.core.ended is None, "it is started again"
    run.instance(JOINED, version=0, endpoint="tcp://again")
    if end == "its supervisor is lost":
        run.core.lost(JOINER, "gone", run.now)
        run.core.tick(run.now)
        assert run.core.ended is None, "the instance itself is still there"
        run.core.lost(JOINED, "gone", run.now)
    elif end == "it leaves":
        run.tell(JOINER, leave(JOINED))
        run.tell("agent-loop-0", *(c.SampleMoves(left=[(g.group, JOINED, 4)]) for g in groups))
    else:
        run.tell(JOINER, down(JOINED))
    run.core.tick(run.now)
    assert run.core.ended is not None and run.core.ended.status == "failed"
    assert "the last rollout instance is gone: instance-0 ended by signal SIGKILL" in run.core.ended.cause


def test_a_joined_agent_loop_is_no_instance_and_the_other_way_round() -> None:
    run, _ = started(num_instances=2)
    loop = "agent-loop-join-7-0-0-0"
    joined(run, loop)
    run.hello("agent_loop", loop, c.AgentState())
    run.tell("node-0", down("agent-loop-0", "agent_loop"), down("instance-0"))
    assert run.core.ended is None
    run.tell("node-0", down("instance-1"))
    assert run.core.ended is not None and "instance-1" in run.core.ended.cause


def test_a_new_coordinator_waits_for_joiners_before_it_calls_an_instance_the_last() -> None:
    run, _ = with_joiner()
    again = restarted(run)
    gone = [down("instance-0"), down("instance-1")]
    again.hello("supervisor", "node-0", c.SupervisorState(gone=gone))
    again.core.tick(0.9 * CLAIM_GRACE_S)
    assert again.core.ended is None
    joined(again, JOINED)
    again.core.tick(CLAIM_GRACE_S)
    assert again.core.ended is None
    again.tell(JOINER, down(JOINED))
    again.now = CLAIM_GRACE_S
    again.core.tick(again.now)
    assert again.core.ended is not None and "instance-1" in again.core.ended.cause


def test_more_instances_than_there_is_room_for_are_sent_away_with_the_cause() -> None:
    run, _ = started(max_instances=3)
    said = joined(run, JOINED, "instance-join-7-0-0-1")
    (refusal,) = of(said, c.Shutdown)
    assert [type(m) for m in to(said, JOINER)] == [c.Welcome, c.Shutdown]
    assert refusal.status == REFUSED and "no room for 2 more roles beside 2 instances" in refusal.cause
    assert [type(m) for m in to(run.instance(JOINED), JOINED)] == [c.Welcome, c.Retire, c.Dismissed]
    run.tell(JOINER, down(JOINED))
    assert run.core.ended is None
    run.core.lost(JOINER, "gone", run.now)
    assert of(joined(run, JOINED), c.Shutdown) == []


def test_what_is_fatal_for_a_joined_role_sends_away_the_joiner_only() -> None:
    run, _ = with_joiner()
    said = run.tell(JOINED, c.Fatal(cause="weights do not fit"))
    (refusal,) = of(said, c.Shutdown)
    assert to(said, JOINER) == [refusal] and refusal.cause == f"{JOINED}: weights do not fit"
    assert [type(m) for m in to(said, JOINED)] == [c.Retire] and run.core.ended is None
    run.tell("instance-0", c.Fatal(cause="weights do not fit"))
    assert run.core.ended is not None


def test_joiners_hear_the_verdict() -> None:
    run, _ = with_joiner()
    said = run.tell("trainer-0", c.TrainerDone(version=4, drained=False))
    assert [m.status for m in to(said, JOINER) if isinstance(m, c.Shutdown)] == ["completed"]


# ---- starts of the whole run -------------------------------------------------------------------------------------


def test_a_role_of_an_earlier_attempt_is_sent_away() -> None:
    run = Run(attempt="7-1")
    state = c.TrainerState(published=3, resumed_from=0, start_nonce="old")
    old = c.Hello(role="trainer", name="trainer-0", node="n", pid=1, sent_s=0.0, attempt="7-0", state=state)
    said = run.tell("trainer-0", old)
    assert [type(message) for _, message in said] == [c.Welcome, c.Shutdown]
    assert run.core.trainer == "" and run.core.staleness.version == 0
    joiner = c.Hello(role="supervisor", name="join-9-0-0", node="n", pid=1, sent_s=0.0, attempt="join-9-0-0")
    assert [type(message) for _, message in run.tell("join-9-0-0", joiner)] == [c.Welcome]


def test_a_node_out_of_reach_drains_a_run_that_goes_on() -> None:
    run = Run(goes_on=True)
    run.hello("trainer", "trainer-0", c.TrainerState(published=0, resumed_from=0, start_nonce="a"))
    run.hello("supervisor", "rollout-node-0", c.SupervisorState())
    run.core.lost("rollout-node-0", "gone", run.now)
    run.now = 11.0
    run.core.tick(run.now)
    said = run.settle()
    assert [m for n, m in said if n == "trainer-0"] == [
        c.DrainNow(reason="rollout-node-0 has been unreachable for 10 s", grace_s=30.0)
    ]
    assert run.core.ended is None
    run.now = 42.0  # the trainer is in the middle of a long step
    run.core.tick(run.now)
    assert run.core.ended is not None and run.core.ended.status == "interrupted"
    assert "the step in hand was given up after 30 s" in run.core.ended.cause


@pytest.mark.parametrize(("goes_on", "status"), [(True, "interrupted"), (False, "failed")])
def test_a_trainer_out_of_reach_ends_the_run(goes_on: bool, status: str) -> None:
    run = Run(goes_on=goes_on)
    run.hello("trainer", "trainer-0", c.TrainerState(published=0, resumed_from=0, start_nonce="a"))
    run.core.lost("trainer-0", "gone", run.now)
    run.core.tick(11.0)
    assert run.core.ended is not None and run.core.ended.status == status
