"""Runs with an instance that does nothing but validate."""

from __future__ import annotations

import pytest
from runs import DEADLINE_S, ONE_INSTANCE, NewRun, Run

from psrl.tasks.prepared import PreparedReader
from psrl.telemetry.metrics import read_metrics

pytestmark = pytest.mark.process

VALIDATED: dict[str, object] = ONE_INSTANCE | {
    "psrl.deployment.n_validate_instances": 1,
    "trainer.test_freq": 2,
    "data.val_max_samples": 12,
    "gen_actor_rollout_ref.rollout.val_kwargs.n": 2,
    "gen_actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
}


def prompts(run: Run, name: str) -> set[bytes]:
    return {prompt.prompt_ids for prompt in PreparedReader(run.dir.data / name)}


def test_versions_are_validated_beside_training(new_run: NewRun) -> None:
    run = new_run(VALIDATED | {"trainer.total_training_steps": 8, "trainer.report": True})
    assert run.launch() == 0
    assert run.steps() == list(range(1, 9))
    rows = read_metrics(run.dir.validation)
    versions = [row["val/version"] for row in rows]
    assert versions == sorted(set(versions)) and versions[-1] == 8, run.story()
    for row in rows:
        assert (row["val/num_samples"], row["val/num_failed"]) == (24, 0)
        assert row["val/digit_sum/reward_mean"] == row["val/reward_mean"]
        assert 0 <= row["val/reward_mean"] <= 1 and 0 < row["val/response_length_mean"] <= 16
    counted = run.outcome.counters
    assert counted["validation/done"] == len(rows) and counted.get("validation/lost", 0) == 0
    held_out = prompts(run, "val_prompts.bin")
    assert len(held_out) == 12 and not held_out & prompts(run, "prompts.bin")
    assert run.audit().fates["trained"] == 8 * 4
    assert "Validation" in (run.dir.report / "index.html").read_text()
    run.nothing_left()


def test_a_validator_that_dies_costs_its_validation_only(new_run: NewRun) -> None:
    """It works on the first validation for longer than the run lasts, and is killed in the middle of it."""
    slow = {
        "data.max_response_length": 256,
        "gen_actor_rollout_ref.rollout.ignore_eos": True,
        "data.val_max_samples": 64,
        "gen_actor_rollout_ref.rollout.val_kwargs.n": 8,
        "trainer.val_timeout_s": 2 * DEADLINE_S,  # the end must not wait for it
    }
    run = new_run(VALIDATED | slow)
    run.start()
    process = run.until(lambda: run.find("validator-0"), "the validator was there")
    run.until(lambda: run.version >= 1, "version 1 was published")
    ready = process.cpu_times().user
    run.until(lambda: process.cpu_times().user > ready + 1.0 or run.version >= 5, "it had worked")
    process.kill()
    assert run.wait() == 0
    assert run.outcome.status == "completed" and run.steps() == list(range(1, 7))
    assert run.outcome.counters["deaths/validator"] == 1
    assert read_metrics(run.dir.validation) == []
    run.audit()
    run.nothing_left()


@pytest.mark.slow
def test_a_validator_is_started_again_and_validates_the_last_version(new_run: NewRun) -> None:
    run = new_run(VALIDATED | {"psrl.fault_tolerance.max_restarts": 1})
    run.start()
    run.kill("validator-0")
    assert run.wait() == 0
    assert [row["val/version"] for row in read_metrics(run.dir.validation)][-1:] == [6], run.story()
    assert run.outcome.counters["deaths/validator"] == 1
