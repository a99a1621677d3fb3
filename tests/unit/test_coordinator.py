"""The coordinator's decisions, message by message, on a clock of the test's own."""

from __future__ import annotations

import pytest
from coordinator_run import SETTINGS, Run, assigned, done, of, restarted, started

from psrl.coordinator.core import CLAIM_GRACE_S, QUARANTINE_S
from psrl.protocol import control as c
from psrl.protocol.generation import EngineStats

pytestmark = pytest.mark.unit


def test_instances_pull_before_anything_is_dispatched() -> None:
    run = Run()
    assert of(run.instance("instance-0"), c.Pull) == []
    said = run.trainer()
    assert [(m.version, m.abort_running) for m in of(said, c.Pull)] == [(0, True)]
    assert assigned(run.hello("agent_loop", "agent-loop-0", c.AgentState())) == []
    assert len(assigned(run.pulled("instance-0", 0))) == 4  # (staleness + 1) x 2 groups


def test_dispatch_fills_the_window_and_balances_instances() -> None:
    _, groups = started()
    assert [g.version for g in groups] == [0] * 4
    assert sorted(g.instance for g in groups) == ["instance-0", "instance-0", "instance-1", "instance-1"]


def test_staleness_zero_is_synchronous() -> None:
    run, groups = started(staleness=0)
    assert len(groups) == 2
    for g in groups:
        assert assigned(run.finish(g.group)) == []
    said = run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    assert [len(m.groups) for m in of(said, c.Buffer)] == [2]
    said = run.tell("trainer-0", c.Published(version=1, incarnation=0))
    assert assigned(said) == [] and len(of(said, c.Pull)) == 2
    for name in ("instance-0", "instance-1"):
        assert [(g.version, g.instance) for g in assigned(run.pulled(name, 1))] == [(1, name)]


def test_a_buffer_ships_in_order_of_occupation_as_soon_as_it_is_full() -> None:
    run, groups = started()
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    assert of(run.finish(groups[3].group), c.Buffer) == []
    (buffer,) = of(run.finish(groups[1].group), c.Buffer)
    assert [g.group for g in buffer.groups] == [groups[3].group, groups[1].group]
    assert of(run.finish(groups[0].group), c.Buffer) == []


def test_a_dead_instance_hands_its_samples_to_others() -> None:
    run, groups = started()
    at_0 = [g.group for g in groups if g.instance == "instance-0"]
    run.tell(
        "supervisor", c.ChildDown(role="instance", name="instance-0", cause="signal SIGKILL", restarting=False, pid=1)
    )
    said = run.tell("agent-loop-0", c.RouteRequest(samples=[(at_0[0], s) for s in range(4)]))
    (routed,) = of(said, c.Routed)
    assert {instance for _, _, instance in routed.samples} == {"instance-1"}
    assert run.core.ended is None


def test_the_last_instance_ends_the_run_with_its_cause() -> None:
    run, _ = started()
    for name in ("instance-0", "instance-1"):
        said = run.tell(
            "supervisor", c.ChildDown(role="instance", name=name, cause="signal SIGKILL", restarting=False, pid=1)
        )
    (verdict, *_) = of(said, c.Shutdown)
    assert verdict.status == "failed" and "instance-1" in verdict.cause and "SIGKILL" in verdict.cause


def test_an_instance_that_restarts_is_waited_for() -> None:
    run, groups = started(num_instances=1)
    for name in ("instance-0", "instance-1"):
        run.tell("supervisor", c.ChildDown(role="instance", name=name, cause="signal SIGKILL", restarting=True, pid=1))
    assert run.core.ended is None
    assert of(run.tell("agent-loop-0", c.RouteRequest(samples=[(groups[0].group, 0)])), c.Routed) == []
    run.instance("instance-0", endpoint="tcp://new")
    (routed,) = of(run.pulled("instance-0", 0), c.Routed)
    assert routed.samples == [(groups[0].group, 0, "instance-0")]


def test_a_trainer_that_dies_ends_the_run() -> None:
    run, _ = started()
    said = run.tell(
        "supervisor", c.ChildDown(role="trainer", name="trainer-0", cause="signal SIGKILL", restarting=False, pid=1)
    )
    assert of(said, c.Shutdown)[0].cause == "trainer-0 ended by signal SIGKILL"


def test_continuations_go_only_to_instances_new_enough() -> None:
    run, groups = started()
    for g in groups[:2]:
        run.finish(g.group)
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    run.tell("trainer-0", c.Published(version=1, incarnation=0))
    new = assigned(run.pulled("instance-1", 1))
    assert new and all(g.version == 1 and g.instance == "instance-1" for g in new)
    said = run.tell(
        "agent-loop-0",
        c.SampleMoves(left=[(new[0].group, "instance-1", 4)]),
        c.RouteRequest(samples=[(new[0].group, 0)]),
    )
    assert [i for m in of(said, c.Routed) for _, _, i in m.samples] == ["instance-1"]


def test_admission_rejects_an_instance_whose_queue_waits() -> None:
    run, groups = started(staleness=3)
    here = [g.group for g in groups if g.instance == "instance-0"]
    run.tell("instance-0", c.InstanceStatus(stats=EngineStats(waiting=3)))
    moved = c.SampleMoves(left=[(group, "instance-0", 4) for group in here[:-1]])
    run.tell("agent-loop-0", moved, c.RouteRequest(samples=[(here[0], 0), (here[0], 1)]))
    assert run.core.placement.instances["instance-0"].in_flight == 4  # less than at the other one
    assert run.core.placement.instances["instance-1"].in_flight == 4 * (len(groups) - len(here)) + 2
    run.tell("instance-0", c.InstanceStatus(stats=EngineStats(waiting=0)))
    run.tell("agent-loop-0", c.RouteRequest(samples=[(here[0], 2)]))
    assert run.core.placement.instances["instance-0"].in_flight == 5


def test_without_partial_rollout_a_lagging_instance_gets_nothing_new() -> None:
    run, groups = started(partial_rollout=False)
    for g in groups[:2]:
        run.finish(g.group)
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    said = run.tell("trainer-0", c.Published(version=1, incarnation=0))
    assert [m.abort_running for m in of(said, c.Pull)] == [False, False]
    assert assigned(said) == []
    assert {g.version for g in assigned(run.pulled("instance-0", 1))} == {1}


def test_a_failed_pull_is_tried_again_after_the_quarantine() -> None:
    run = Run()
    run.trainer()
    run.instance("instance-0")
    assert of(run.tell("instance-0", c.PullFailed(version=0, cause="torn")), c.Pull) == []
    run.now += QUARANTINE_S
    assert len(of(run.settle(), c.Pull)) == 1


@pytest.mark.parametrize(("reason", "retry", "attempts"), [("error", True, [0, 1]), ("invalid_rewards", False, [0])])
def test_a_failed_group_is_tried_again_then_replaced(reason: str, retry: bool, attempts: list[int]) -> None:
    run, groups = started()
    prompt, seen = groups[0].prompt, [groups[0].attempt]
    group = groups[0].group
    for _ in range(3):
        said = run.tell("agent-loop-0", c.GroupFailed(group=group, reason=reason, detail="boom", retry=retry))
        again = [g for g in assigned(said) if g.prompt == prompt]
        if not again:
            break
        seen.append(again[0].attempt)
        group = again[0].group
    assert seen == attempts
    assert run.core.counters[f"{reason}/prompt_{prompt}"] == len(attempts)


def test_a_lost_agent_loop_returns_its_prompts_once() -> None:
    run, groups = started()
    run.tell(
        "supervisor",
        c.ChildDown(role="agent_loop", name="agent-loop-0", cause="signal SIGKILL", restarting=True, pid=1),
    )
    again = assigned(run.hello("agent_loop", "agent-loop-0", c.AgentState()))
    assert [g.prompt for g in again] == [g.prompt for g in groups]
    assert {g.attempt for g in again} == {0}
    assert not {g.group for g in again} & {g.group for g in groups}


def test_a_coordinator_restart_keeps_what_the_agent_loop_holds() -> None:
    run, groups = started()
    again = restarted(run)
    again.instance("instance-0", version=0)
    again.instance("instance-1", version=0)
    again.trainer(published=0, wants=0)
    held = [c.HeldGroup(group=g.group, on={g.instance: 4}) for g in groups[2:]]
    held += [c.HeldGroup(group=g.group, done=done(g.group)) for g in groups[:2]]
    said = again.hello("agent_loop", "agent-loop-0", c.AgentState(held=held))
    (buffer,) = of(said, c.Buffer)
    assert {g.group for g in buffer.groups} == {g.group for g in groups[:2]}
    assert again.core.staleness.incarnation == run.core.staleness.incarnation


def test_reservations_that_nobody_claims_return_to_the_queue() -> None:
    run, groups = started()
    again = restarted(run)
    again.instance("instance-0", version=0)
    again.trainer()
    assert assigned(again.hello("agent_loop", "agent-loop-0", c.AgentState())) == []
    again.now = CLAIM_GRACE_S
    again.core.tick(again.now)
    assert [g.prompt for g in assigned(again.settle())] == [g.prompt for g in groups]


def test_a_new_trainer_is_a_new_incarnation_and_everybody_pulls_again() -> None:
    run, groups = started()
    said = run.trainer(nonce="b")
    assert run.core.staleness.incarnation == 1
    assert {(m.version, m.incarnation) for m in of(said, c.Pull)} == {(0, 1)}
    assert sorted(g for m in of(said, c.GroupAbort) for g in m.groups) == [g.group for g in groups]
    assert assigned(said) == []
    again = [g for name in ("instance-0", "instance-1") for g in assigned(run.pulled(name, 0, incarnation=1))]
    assert [g.prompt for g in again] == [g.prompt for g in groups]
    assert run.tell("trainer-0", c.Published(version=1, incarnation=0)) == []  # of the past: refused


def test_a_repeated_question_gets_the_same_buffer() -> None:
    run, groups = started()
    for g in groups[:2]:
        run.finish(g.group)
    (first,) = of(run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0)), c.Buffer)
    (second,) = of(run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0)), c.Buffer)
    assert first.groups == second.groups


def test_a_drain_asks_the_trainer_and_ends_when_it_is_done() -> None:
    run, groups = started()
    said = run.tell("supervisor", c.Drain(reason="SIGTERM", grace_s=30.0))
    assert [name for name, m in said if isinstance(m, c.DrainNow)] == ["trainer-0"]
    run.finish(groups[0].group)
    assert assigned(run.finish(groups[1].group)) == []
    said = run.tell("trainer-0", c.TrainerDone(version=0, drained=True))
    assert {m.status for m in of(said, c.Shutdown)} == {"interrupted"}


def test_nothing_beyond_the_last_step_is_reserved() -> None:
    run, groups = started(steps=1, staleness=3)
    assert len(groups) == 2
    for g in groups:
        run.finish(g.group)
    assert assigned(run.settle()) == []


@pytest.mark.parametrize("lacking", ["the trainer", "a rollout instance", "an agent loop"])
def test_a_start_that_takes_too_long_names_who_is_missing(lacking: str) -> None:
    run = Run()
    if lacking != "the trainer":
        run.trainer()
    if lacking == "an agent loop":
        run.instance("instance-0")
        run.pulled("instance-0", 0)
    run.now = SETTINGS.startup_timeout_s + 1
    run.core.tick(run.now)
    assert run.core.ended is not None and run.core.ended.status == "failed" and lacking in run.core.ended.cause


@pytest.mark.parametrize("silent", [("instance-0", "instance-1"), ("agent-loop-0",)])
def test_parts_that_all_fall_silent_are_waited_for_and_then_end_the_run(silent: tuple[str, ...]) -> None:
    run, _ = started()
    run.core.tick(50.0)
    for name in silent:
        run.core.lost(name, "silent", 50.0)
    run.core.tick(50.0 + SETTINGS.startup_timeout_s)
    assert run.core.ended is None
    run.core.tick(51.0 + SETTINGS.startup_timeout_s)
    assert run.core.ended is not None and run.core.ended.status == "failed"


def test_a_new_coordinator_hears_from_the_supervisor_who_is_gone_for_good() -> None:
    run, _ = started()
    gone = c.ChildDown(role="instance", name="instance-1", cause="signal SIGKILL", restarting=False, pid=7)
    run.hello("supervisor", "supervisor-rollout", c.SupervisorState(gone=[gone]))
    assert run.core.ended is None
    last = c.ChildDown(role="instance", name="instance-0", cause="exit code 3", restarting=False, pid=8)
    (verdict, *_) = of(run.tell("supervisor-rollout", last), c.Shutdown)
    assert "the last rollout instance is gone: instance-0 ended by exit code 3" in verdict.cause


def test_late_news_of_a_death_do_not_touch_the_successor() -> None:
    run, groups = started()
    dead = c.ChildDown(role="agent_loop", name="agent-loop-0", cause="signal SIGKILL", restarting=True, pid=99)
    assert run.tell("supervisor", dead) == []
    assert run.core.placement.held_by("agent-loop-0") == [g.group for g in groups]


def test_a_checkpoint_older_than_the_kept_groups_ends_the_run_with_the_cause() -> None:
    run, groups = started()
    for version in (1, 2):
        for g in groups[:2]:
            run.finish(g.group)
        run.tell("trainer-0", c.WantBuffer(buffer=version - 1, incarnation=0))
        run.tell("trainer-0", c.Published(version=version, incarnation=0))
        groups = groups[2:] + assigned(run.pulled("instance-0", version))
    run.tell("trainer-0", c.CheckpointDone(version=2, seconds=0.1))
    said = run.trainer(resumed_from=0, nonce="b")
    (verdict, *_) = of(said, c.Shutdown)
    assert verdict.status == "failed" and "trainer-0 cannot go on" in verdict.cause and "from 2 to 2" in verdict.cause
    assert run.core.staleness.incarnation == 0, "nothing of it is in the ledger"


def test_nobody_is_missed_after_the_verdict(caplog: pytest.LogCaptureFixture) -> None:
    run, _ = started()
    run.tell("trainer-0", c.TrainerDone(version=4, drained=False))
    for name in ("instance-0", "agent-loop-0"):
        run.core.lost(name, "its connection is gone", run.now)
    assert not [r for r in caplog.records if "is gone" in r.message] and run.core.records == []


def test_a_supervisor_that_stays_away_ends_the_run() -> None:
    run, _ = started()
    run.hello("supervisor", "supervisor-rollout", c.SupervisorState())
    run.core.lost("supervisor-rollout", "gone", run.now)
    run.core.tick(run.now + 1)
    assert run.core.ended is None
    run.core.tick(run.now + SETTINGS.missing_timeout_s)
    assert run.core.ended is not None and "supervisor-rollout" in run.core.ended.cause


def test_filtering_refills_the_batch() -> None:
    """B=4, groups 1, 3 and 5 carry no signal: the batch is 2, 4, 6, 7, in that order, and their places are free again."""
    run, groups = started(buffer_entries=4, staleness=0, steps=1)
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=0))
    queue, batch, number = [g.group for g in groups], [], 0
    kept: list[int] = []
    while not batch:
        number += 1
        group = queue.pop(0)
        if number in (1, 3, 5):
            said = run.tell(
                "agent-loop-0", c.GroupFailed(group=group, reason="filtered", detail="equal rewards", retry=False)
            )
        else:
            kept.append(group)
            said = run.finish(group)
        queue += [g.group for g in assigned(said)]
        batch = [g.group for m in of(said, c.Buffer) for g in m.groups]
    assert number == 7 and batch == kept and len(batch) == 4
