"""Pulls and migrations as the coordinator orders them: message by message."""

from __future__ import annotations

import pytest
from coordinator_run import Run, assigned, of, started

from psrl.coordinator.migration import MigrationSettings
from psrl.coordinator.sync.settings import SyncSettings
from psrl.coordinator.upkeep import QUARANTINE_S
from psrl.protocol import control as c
from psrl.protocol.generation import FINISH_ABORT, FINISH_MIGRATED, EngineStats

pytestmark = pytest.mark.unit

STATUS = SyncSettings(method="status_based", indicator="request_num", threshold=4)
MIGRATE = MigrationSettings(indicator="request_num", threshold=2, stop_indicator="request_num", stop_threshold=6)


def publish(run: Run, version: int) -> list:
    return run.tell("trainer-0", c.Published(version=version, incarnation=run.core.staleness.incarnation))


def train_first_buffer(run: Run, groups: list[c.Assignment]) -> list:
    """Finish the groups of buffer 0, have it taken and version 1 published. Returns what is said upon that."""
    run.tell("trainer-0", c.WantBuffer(buffer=0, incarnation=run.core.staleness.incarnation))
    for group in groups[:2]:
        run.finish(group.group)
    return publish(run, 1)


def pulled(said: list) -> dict[str, c.Pull]:
    return {name: message for name, message in said if isinstance(message, c.Pull)}


def left(group: int, instance: str, count: int) -> c.SampleMoves:
    return c.SampleMoves(left=[(group, instance, count)])


def later(run: Run, seconds: float = 0.2) -> list:
    run.now += seconds
    return run.settle()


# ---- pulls -----------------------------------------------------------------------------------------------------


def test_greedy_orders_every_pull_at_the_publication_and_only_then() -> None:
    run, groups = started()
    assert run.core.next_look_s >= 0.0
    assert pulled(later(run)) == {}
    orders = pulled(train_first_buffer(run, groups))
    assert set(orders) == {"instance-0", "instance-1"}
    assert all(order.abort_running and order.version == 1 for order in orders.values())
    assert pulled(later(run)) == {}, "once"
    run.pulled("instance-0", 1)
    assert run.core.counters["pulls"] == 3, "two at the start, one now"


def test_status_based_waits_for_the_load_to_fall_and_looks_when_it_does() -> None:
    """Each instance has two groups of four. Buffer 0 is trained: one group is left at each, then new ones come."""
    run, groups = started(sync=STATUS)
    assert sorted(g.instance for g in groups) == ["instance-0", "instance-0", "instance-1", "instance-1"]
    assert pulled(train_first_buffer(run, groups)) == {
        "instance-0": c.Pull(version=1, incarnation=0, abort_running=True)
    } | {"instance-1": c.Pull(version=1, incarnation=0, abort_running=True)}, "4 samples each: at the threshold"

    run, groups = started(sync=SyncSettings(method="status_based", indicator="request_num", threshold=3))
    assert pulled(train_first_buffer(run, groups)) == {}, "4 samples each: above it"
    busy = groups[2]
    said = run.tell("agent-loop-0", left(busy.group, busy.instance, 1))
    assert set(pulled(said)) == {busy.instance}, "the one that changed, at once and without waiting for the clock"


def test_an_instance_that_switches_gets_nothing_new_until_it_is_done() -> None:
    run, groups = started()
    train_first_buffer(run, groups)
    sample = (groups[2].group, 0)
    run.tell("instance-0", c.PullStarted(version=1), c.Switching(version=1))
    run.tell("instance-1", c.PullStarted(version=1), c.Switching(version=1))
    home = groups[2].instance
    said = run.tell(
        "agent-loop-0", left(sample[0], home, 1), c.RouteRequest(samples=[sample], reason=FINISH_ABORT, instance=home)
    )
    assert of(said, c.Routed) == []
    said = run.pulled("instance-1", 1)
    assert of(said, c.Routed) == [c.Routed(samples=[(*sample, "instance-1")], incarnation=0)]
    assert run.core.counters["interrupted_samples"] == 1


def test_without_partial_rollout_nothing_new_goes_to_an_instance_from_the_moment_it_is_behind() -> None:
    run, groups = started(partial_rollout=False)
    orders = pulled(train_first_buffer(run, groups))
    assert len(orders) == 2 and not any(order.abort_running for order in orders.values())
    assert assigned(later(run)) == []
    assert assigned(run.pulled("instance-0", 1)) != []


def test_a_failed_pull_is_tried_again_after_the_quarantine_and_stops_no_routing() -> None:
    run, groups = started()
    train_first_buffer(run, groups)
    run.tell("instance-0", c.PullStarted(version=1), c.Switching(version=1))
    run.tell("instance-0", c.PullFailed(version=1, cause="no route"))
    assert not run.core.placement.instances["instance-0"].draining
    assert pulled(later(run, QUARANTINE_S - 0.1)) == {}
    assert run.core.next_look_s <= run.now + 0.1
    assert set(pulled(later(run, 0.1))) == {"instance-0"}


def test_a_lagging_instance_without_work_pulls_whatever_the_strategy_says() -> None:
    """This one never lets an instance pull before version 99 is there."""
    never = SyncSettings(method="status_based", indicator="kv_cache", threshold=0, seamless_train_version=99)
    run, groups = started(sync=never, staleness=0)
    assert [g.instance for g in groups] == ["instance-0", "instance-1"]
    orders = pulled(train_first_buffer(run, groups))
    assert set(orders) == {"instance-0", "instance-1"}, "staleness 0: nothing is left that they might do"


def test_who_has_work_at_the_old_version_is_left_to_it_below_the_seamless_version() -> None:
    eager = SyncSettings(method="status_based", threshold=100, seamless_train_version=2)
    run, groups = started(sync=eager, staleness=2)
    assert len(groups) == 6 and {g.instance for g in groups[4:]} == {"instance-0", "instance-1"}
    assert pulled(train_first_buffer(run, groups)) == {}
    assert pulled(run.finish(groups[2].group)) == {} and pulled(later(run)) == {}
    said = [*run.finish(groups[3].group), *later(run)]  # buffer 1 is ready; each instance still makes one for buffer 2
    assert set(pulled(said)) == {"instance-0", "instance-1"}


def test_reported_loads_decide_when_they_arrive() -> None:
    by_kv = SyncSettings(method="status_based", indicator="kv_cache", threshold=30)
    run, groups = started(sync=by_kv)
    for name in ("instance-0", "instance-1"):
        run.tell(name, c.InstanceStatus(stats=EngineStats(running=8, kv_usage=0.9), at_s=1.0))
    assert pulled(train_first_buffer(run, groups)) == {}
    assert pulled(later(run)) == {}
    said = run.tell("instance-1", c.InstanceStatus(stats=EngineStats(running=1, kv_usage=0.2), at_s=2.0))
    assert set(pulled(said)) == {"instance-1"}


def test_hypothesis_test_is_asked_about_the_whole_fleet() -> None:
    """Nothing may be reserved at version 0 any more once buffer 1 is promised; after the publication 2 groups of 4 samples,
    2 tokens each, may be at version 1. 16 tokens are won; of the two instances one has room for all of it."""
    test = SyncSettings(method="status_based", indicator="hypothesis_test", threshold=0)
    run, groups = started(sync=test)
    assert len(pulled(train_first_buffer(run, groups))) == 1
    assert pulled(later(run)) == {}, "the rest is nothing to pull for"


def test_nobody_asks_for_looks_while_nobody_is_behind_and_nothing_can_migrate() -> None:
    run, groups = started(sync=SyncSettings(method="status_based", threshold=0, check_interval_s=0.02))
    quiet = run.core.next_look_s
    train_first_buffer(run, groups)
    assert run.core.next_look_s <= run.now + 0.02 < quiet


# ---- migration -------------------------------------------------------------------------------------------------


def unbalanced() -> tuple[Run, list[c.Assignment]]:
    """16 samples at instance-0; instance-1, which was away when they were placed, is back and empty."""
    run = Run(migration=MIGRATE)
    run.trainer()
    run.instance("instance-0")
    run.pulled("instance-0", 0)
    groups = assigned(run.hello("agent_loop", "agent-loop-0", c.AgentState()))
    assert [g.instance for g in groups] == ["instance-0"] * 4
    run.instance("instance-1")
    return run, groups


def handed_back(said: list) -> list[str]:
    return [name for name, message in said if isinstance(message, c.HandBack)]


def hand_back(run: Run, groups: list[c.Assignment]) -> list:
    """The agent loop says where all samples of these groups have left, and asks where they go on."""
    said = []
    for group in groups:
        samples = [(group.group, sample) for sample in range(4)]
        request = c.RouteRequest(samples=samples, reason=FINISH_MIGRATED, instance="instance-0")
        said += run.tell("agent-loop-0", left(group.group, "instance-0", 4), request)
    return said


def test_the_busiest_hands_back_everything_and_it_is_placed_evenly() -> None:
    run, groups = unbalanced()
    assert handed_back(later(run)) == [], "the other one has no weights yet"
    waiting = c.InstanceStatus(stats=EngineStats(running=14, waiting=2), at_s=1.0)
    run.tell("instance-0", waiting)
    run.pulled("instance-1", 0)
    assert handed_back(later(run)) == ["instance-0"]
    assert handed_back(later(run)) == [], "one at a time"
    run.tell("instance-0", waiting)  # it had not heard yet
    said = hand_back(run, groups)
    placed = [instance for message in of(said, c.Routed) for _, _, instance in message.samples]
    assert sorted(placed) == ["instance-0"] * 8 + ["instance-1"] * 8
    assert handed_back(later(run)) == [] and not run.core.migrations.source
    assert (run.core.counters["migrations"], run.core.counters["migrated_samples"]) == (1, 16)


@pytest.mark.parametrize(
    "why", ["pulls", "leaves", "other weights", "requests wait for it", "the busy one pulls", "the other one is full"]
)
def test_nothing_is_handed_back_that_could_not_be_taken_or_comes_back_anyway(why: str) -> None:
    run, groups = unbalanced()
    run.pulled("instance-1", 0)
    busy, idle = (run.core.placement.instances[f"instance-{i}"] for i in (0, 1))
    match why:
        case "pulls":
            idle.pulling = 1
        case "leaves":
            idle.leaving = True
        case "other weights":
            idle.incarnation, idle.pulling = 7, 0
        case "requests wait for it":
            busy.draining = idle.draining = True
            request = c.RouteRequest(samples=[(groups[0].group, 0)], instance="instance-0")
            run.tell("agent-loop-0", left(groups[0].group, "instance-0", 1), request)
            busy.draining = idle.draining = False
            run.core.fleet.may_take = lambda *_: False
            run.core.fleet.choose = lambda *_: None
        case "the busy one pulls":
            busy.pulling = 1
        case "the other one is full":
            idle.max_concurrent = 0
    assert handed_back(later(run)) == []


def test_a_source_that_dies_is_no_migration_under_way() -> None:
    run, _ = unbalanced()
    run.pulled("instance-1", 0)
    assert handed_back(later(run)) == ["instance-0"]
    run.core.lost("instance-0", "killed", run.now)
    later(run)
    assert not run.core.migrations.source


def test_a_source_that_was_away_when_told_is_told_again() -> None:
    """Its hello says that it may not have heard."""
    run, _ = unbalanced()
    run.pulled("instance-1", 0)
    assert handed_back(later(run)) == ["instance-0"]
    run.instance("instance-0", version=0)
    assert handed_back(later(run)) == ["instance-0"]
