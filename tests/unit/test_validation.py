"""When versions are validated, by whom, and what comes of it."""

from collections import Counter

import pytest
from coordinator_run import Run, assigned, of, started

from psrl.coordinator.validation import Validation, ValidationSettings, validation_row
from psrl.protocol import control as c
from psrl.protocol.validation import SourceScores, Validate, ValidationDone, ValidationFailed, ValidatorState

pytestmark = pytest.mark.unit

SETTINGS = ValidationSettings(every=4, timeout_s=100.0)


def scores(samples=2, reward_sum=1.0, **more):
    return SourceScores(samples=samples, reward_sum=reward_sum, response_tokens=10 * samples, **more)


def validation(*names, **changes):
    settings = ValidationSettings(**{"every": 4, "timeout_s": 100.0, "num_validators": len(names) or 1} | changes)
    found = Validation(settings, Counter())
    for name in names:
        found.here(name)
    return found


def done(version, incarnation=0, **sources):
    return ValidationDone(version=version, incarnation=incarnation, scores=sources or {"a": scores()})


def finish(found, version, now_s=1.0):
    found.done("v0", done(version), now_s)


@pytest.mark.parametrize(
    ("changes", "versions", "validated"),
    [
        ({}, range(13), [0, 4, 8, 12]),
        ({"before_train": False}, range(9), [4, 8]),
        ({"every": 1}, range(4), [0, 1, 2, 3]),
        ({}, [-1, -1, 0], [0]),
        ({}, [1, 2, 3, 4, 5], [1, 4]),  # nobody was there in time for 0
        ({}, [0, 3, 6, 7, 9], [0, 6, 9]),  # 4 and 8 were due while the validators were busy
        ({"validated": 8}, [8, 9, 11, 12], [12]),  # a coordinator that was started again
    ],
)
def test_which_versions_are_validated(changes, versions, validated):
    found, seen = validation("v0", **changes), []
    for version in versions:
        seen += [order.version for _, order in found.look(version, 0, 0.0)]
        finish(found, version)
    assert seen == validated
    assert [row["val/version"] for row in found.rows] == validated


def test_a_validation_is_at_one_version_until_it_is_through():
    found = validation("v0", "v1")
    assert found.look(4, 7, 0.0) == [
        ("v0", Validate(version=4, incarnation=7, part=0, parts=2)),
        ("v1", Validate(version=4, incarnation=7, part=1, parts=2)),
    ]
    found.done("v1", done(4, 7), 1.0)
    assert found.look(9, 7, 2.0) == [] and found.rows == []
    found.done("v0", done(4, 7), 3.0)
    assert [row["val/version"] for row in found.rows] == [4]
    assert {order.version for _, order in found.look(17, 7, 4.0)} == {17}  # 8, 12 and 16 were due meanwhile
    assert found.counters == {"validation/done": 1, "validation/passed_over": 3}  # 0 with 4; 8 and 12 with 16


@pytest.mark.parametrize("answer", [done(8), done(4, incarnation=1)])
def test_answers_to_something_else_do_not_count(answer):
    found = validation("v0")
    found.look(4, 0, 0.0)
    found.done("v0", answer, 1.0)
    found.done("v9", done(4), 1.0)
    assert found.rows == []


@pytest.mark.parametrize(
    "hurt",
    [
        lambda found: found.lost("v1", "signal SIGKILL"),
        lambda found: found.failed("v1", ValidationFailed(version=4, cause="its weights are gone")),
        lambda found: found.look(4, 0, 100.0),  # its time is up
    ],
)
def test_what_goes_wrong_costs_one_validation(hurt):
    found = validation("v0", "v1")
    found.look(4, 0, 0.0)
    found.done("v0", done(4), 1.0)
    hurt(found)
    assert found.counters["validation/lost"] == 1
    found.done("v1", done(4), 101.0)
    assert found.rows == [] and found.look(7, 0, 102.0) == []
    assert {order.version for _, order in found.look(8, 0, 103.0)} == {8}


def test_a_validator_that_has_done_its_part_may_die():
    found = validation("v0", "v1")
    found.look(4, 0, 0.0)
    found.done("v0", done(4), 1.0)
    found.lost("v0", "signal SIGKILL")
    found.done("v1", done(4), 2.0)
    assert [row["val/num_samples"] for row in found.rows] == [4]
    assert [order.parts for _, order in found.look(8, 0, 3.0)] == [1]


def test_a_resume_validates_again_what_is_made_again():
    found = validation("v0")
    for version in (4, 8):
        found.look(version, 0, 0.0)
        finish(found, version)
    found.restart(6)
    assert found.look(7, 1, 0.0) == []
    assert [order.incarnation for _, order in found.look(8, 1, 0.0)] == [1]


def test_the_end_waits_for_the_last_version():
    found = validation("v0")
    found.look(4, 0, 0.0)
    found.finish(6, 10.0)
    assert not found.finished(10.0)  # version 4 is under way
    finish(found, 4)
    assert not found.finished(11.0)  # version 6 is due now
    assert [order.version for _, order in found.look(6, 0, 11.0)] == [6]
    assert not found.finished(11.0)
    finish(found, 6)
    assert found.finished(12.0)
    assert found.look(6, 0, 13.0) == []


@pytest.mark.parametrize(
    ("prepare", "now_s", "finished"),
    [
        (lambda found: None, 109.9, False),
        (lambda found: None, 110.0, True),  # the time is up
        (lambda found: found.lost("v0", "gone"), 20.0, False),  # it may be started again
        (lambda found: (found.lost("v0", "gone"), found.gone_for_good("v0")), 20.0, True),
        (lambda found: (found.gone_for_good("v0"), found.here("v0")), 20.0, False),
    ],
)
def test_the_end_does_not_wait_for_ever(prepare, now_s, finished):
    found = validation("v0", validated=0)
    found.finish(6, 10.0)
    prepare(found)
    assert found.finished(now_s) is finished


def test_without_validation_nothing_is_due():
    found = Validation(None, Counter())
    found.here("v0")
    assert found.look(0, 0, 0.0) == []
    found.finish(4, 0.0)
    assert found.finished(0.0)


def test_the_row_by_hand():
    parts = [
        {
            "gsm": SourceScores(samples=4, failed=1, reward_sum=2.0, response_tokens=40, cut_off=1),
            "code": SourceScores(samples=2, failed=2, response_tokens=10, cut_off=2),
        },
        {"gsm": SourceScores(samples=2, reward_sum=0.5, response_tokens=30)},
    ]
    assert validation_row(7, 1.25, parts) == {
        "training/global_step": 7,
        "val/version": 7,
        "val/seconds": 1.25,
        "val/num_samples": 8,
        "val/num_failed": 3,
        "val/reward_mean": 0.5,  # 2.5 over 5 samples with a reward
        "val/response_length_mean": 10.0,
        "val/response_length_clip_ratio": 3 / 8,
        "val/gsm/reward_mean": 0.5,
        "val/gsm/response_length_mean": 70 / 6,
        "val/code/response_length_mean": 5.0,
    }


# ---- in the coordinator --------------------------------------------------------------------------------------


def validator_hello(run: Run, name="validator-0"):
    return run.hello("validator", name, ValidatorState())


def test_a_validator_takes_no_group_and_no_pull():
    run = Run(validation=SETTINGS)
    run.trainer()
    said = validator_hello(run) + run.instance("instance-0") + run.pulled("instance-0", 0)
    said += run.hello("agent_loop", "agent-loop-0", c.AgentState())
    assert [type(m) for name, m in said if name == "validator-0"] == [c.Welcome, Validate]
    assert {name for name, m in said if isinstance(m, c.Pull)} == {"instance-0"}
    assert {a.instance for a in assigned(said)} == {"instance-0"}
    assert {i.name for m in of(said, c.Instances) for i in m.instances} == {"instance-0"}


def test_the_run_ends_with_training_when_all_is_validated():
    run, _ = started(validation=SETTINGS)
    validator_hello(run)
    run.tell("validator-0", done(0))
    said = run.tell("trainer-0", c.TrainerDone(version=0, drained=False))
    assert {m.status for m in of(said, c.Shutdown)} == {"completed"}
    assert [row["val/version"] for row in run.core.validation.rows] == [0]


def test_the_run_waits_for_the_validation_under_way_and_nothing_fails_it_meanwhile():
    run, _ = started(validation=SETTINGS)
    assert of(validator_hello(run), Validate) == [Validate(version=0, incarnation=0, part=0, parts=1)]
    assert of(run.tell("trainer-0", c.TrainerDone(version=0, drained=False)), c.Shutdown) == []
    run.core.end("failed", "the last rollout instance is gone")
    ended = run.settle()
    assert {m.status for m in of(ended, c.Shutdown)} == {"completed"}
    assert ("validator-0", run.core.ended) in ended


def test_a_dead_validator_does_not_hold_up_the_end():
    run, _ = started(validation=SETTINGS)
    validator_hello(run)
    run.tell("trainer-0", c.TrainerDone(version=0, drained=False))
    down = c.ChildDown(role="validator", name="validator-0", cause="signal SIGKILL", restarting=False, pid=1)
    said = run.tell("supervisor-rollout", down)
    assert {m.status for m in of(said, c.Shutdown)} == {"completed"}
    assert run.core.counters["validation/lost"] == 1 and run.core.counters["deaths/validator"] == 1


def test_a_drain_does_not_wait_for_validation():
    run, _ = started(validation=SETTINGS)
    validator_hello(run)
    run.tell("trainer-0", c.TrainerDone(version=0, drained=False))
    said = run.tell("supervisor-trainer", c.Drain(reason="SIGTERM", grace_s=30.0))
    assert {m.status for m in of(said, c.Shutdown)} == {"completed"}
