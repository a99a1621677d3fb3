"""Known faults of other systems, across migration: zero-signal groups, failing rewards, half answers taken for whole ones."""

from __future__ import annotations

import pytest
from coordinator_run import Run, assigned, done, of
from fleet_model import Fleet

from psrl.coordinator.migration import MigrationSettings
from psrl.coordinator.records import Release, Take
from psrl.protocol import control as c
from psrl.protocol.generation import (
    FINISH_ABORT,
    FINISH_MIGRATED,
    FINISH_REFUSED,
    FINISH_STOP,
    SamplingParams,
    TokenChunk,
)
from psrl.protocol.samples import VersionSpan
from psrl.rollout.group_work import GroupWork

pytestmark = pytest.mark.unit

MIGRATE = MigrationSettings(indicator="request_num", threshold=2, stop_indicator="request_num", stop_threshold=2)


def migrating(**changes) -> tuple[Run, list[c.Assignment]]:
    """All groups at instance-0, which has just been told to hand them back to make use of instance-1."""
    run = Run(migration=MIGRATE, samples_per_group=2, **changes)
    run.trainer(wants=0)
    run.instance("instance-0")
    run.pulled("instance-0", 0)
    groups = assigned(run.hello("agent_loop", "agent-loop-0", c.AgentState()))
    run.instance("instance-1")
    run.pulled("instance-1", 0)
    run.now += 0.2
    assert of(run.settle(), c.HandBack)
    return run, groups


def hand_back(run: Run, group: int, n: int = 2) -> list:
    request = c.RouteRequest(
        samples=[(group, i) for i in range(n)], reason=FINISH_MIGRATED, instance="instance-0", tokens=[1] * n
    )
    return run.tell("agent-loop-0", c.SampleMoves(left=[(group, "instance-0", n)]), request)


# ---- B04: zero-signal groups are filtered, the batch keeps its size ----------------------------------------------


def test_b04_a_group_filtered_in_mid_migration_is_replaced_and_the_batch_is_whole() -> None:
    run, groups = migrating(buffer_entries=4, staleness=0)
    filtered, others = groups[0], groups[1:]
    said = run.tell("agent-loop-0", c.GroupFailed(group=filtered.group, reason="filtered", detail="", retry=False))
    (fresh,) = assigned(said)  # its place is free at once
    for group in others:
        hand_back(run, group.group)
    run.now += 0.2
    run.settle()
    assert not run.core.migrations.source, "the filtered group is not waited for"
    for group in [*others, fresh]:
        run.finish(group.group)
    (take,) = [record for record in run.records if isinstance(record, Take)]
    assert take.groups == [g.group for g in [*others, fresh]] and len(take.groups) == 4


# ---- B06: a reward that raises or hangs --------------------------------------------------------------------------


def test_b06_a_group_that_fails_in_mid_migration_is_tried_again_and_its_samples_are_asked_for_no_more() -> None:
    run, groups = migrating(buffer_entries=2, staleness=0, max_group_retries=1)
    failing = groups[0]
    run.tell("agent-loop-0", c.GroupFailed(group=failing.group, reason="error", detail="ValueError", retry=True))
    said = hand_back(run, failing.group)  # was on its way already
    assert of(said, c.Routed) == [], "the group is closed: its samples go nowhere"
    (release,) = [record for record in run.records if isinstance(record, Release)]
    assert (release.group, release.outcome, run.core.counters["error"]) == (failing.group, "requeued", 1)
    hand_back(run, groups[1].group)
    run.now += 0.2
    run.settle()
    assert not run.core.migrations.source
    again = next(r for r in run.core.staleness.open_groups() if r.attempt == 1)
    assert again.position.prompt == failing.prompt
    for group in (groups[1].group, again.group):
        run.finish(group)
    assert [r for r in run.records if isinstance(r, Take)]


def test_b06_a_group_done_in_mid_migration_leaves_nothing_to_wait_for() -> None:
    """Its last tokens were made before the order to hand back arrived."""
    run, groups = migrating(buffer_entries=2, staleness=0)
    moves = c.SampleMoves(left=[(groups[0].group, "instance-0", 2)])
    run.tell("agent-loop-0", moves, done(groups[0].group))
    hand_back(run, groups[1].group)
    run.now += 0.2
    run.settle()
    assert not run.core.migrations.source and run.core.counters["migrated_samples"] == 2


# ---- B11: interrupted is not finished ------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", [FINISH_ABORT, FINISH_MIGRATED, FINISH_REFUSED])
def test_b11_a_sample_that_was_moved_goes_on_and_is_whole_once(interrupted: str) -> None:
    """Tokens 5, 6 at weights 1, then moved; 7 and the end at weights 2: one sample of four tokens with four log-probs."""
    assignment = c.Assignment(
        group=0, data_epoch=0, prompt=0, n=1, version=1, incarnation=0, instance="instance-0", attempt=0
    )
    work = GroupWork(assignment, [1, 2], SamplingParams(), 8, seed=0)
    assert work.request("instance-0", [0]) is not None

    def chunk(tokens: list[int], version: int, finish: str) -> TokenChunk:
        return TokenChunk(
            group=0,
            sample=0,
            token_ids=tokens,
            logprobs=[-0.5 * token for token in tokens],
            spans=[VersionSpan(0, len(tokens), version)],
            finish=finish,
        )

    assert work.add(chunk([5, 6], 1, interrupted), "instance-0") == (True, True), "left, and to be routed again"
    assert work.unfinished == 1 and work.looking() == [0]
    assert work.add(chunk([9], 1, FINISH_STOP), "instance-0") == (False, False), (
        "what comes late from there is not taken"
    )
    request = work.request("instance-1", [0])
    assert request is not None and request.samples[0].prefix_ids == (5, 6)
    assert request.samples[0].max_new_tokens == 8 - 2 and request.min_version == 1
    assert work.add(chunk([7, 0], 2, FINISH_STOP), "instance-1") == (True, False)
    (sample,) = work.samples
    assert (sample.token_ids, sample.logprobs, sample.finish) == ([5, 6, 7, 0], [-2.5, -3.0, -3.5, 0.0], FINISH_STOP)
    assert sample.spans == [VersionSpan(0, 2, 1), VersionSpan(2, 4, 2)] and work.unfinished == 0


@pytest.mark.parametrize("lost", [False, True])
def test_b11_a_whole_run_with_migrations_scores_every_sample_once(lost: bool) -> None:
    """instance-1 comes late (and, `lost`, instance-0 dies just after it was told to hand back): the model asserts that no
    token is made twice and no sample is done before its end."""
    fleet = Fleet(
        lambda group, sample: 12,
        instances=2,
        buffer_entries=4,
        staleness=1,
        steps=3,
        samples_per_group=2,
        migration=MIGRATE,
    )
    first, late = fleet.instances.values()
    fleet.kill(late)
    while not first.samples:
        for _, move in fleet.possible():
            move()
    fleet.restart(late)
    while not fleet.run.core.counters["migrations"]:
        fleet.pass_time(0.2)
        for channel, queue in sorted(fleet.channels.items()):
            while queue:
                fleet.deliver(channel)
        fleet.switch(late)
    if lost:
        fleet.kill(first)
        fleet.restart(first)
    fleet.calm(rounds=500)
    fleet.check_end(4, 1)
    assert fleet.run.core.counters["migrated_samples"] >= 1 or lost
