"""Deaths in whole runs: real processes, real signals. One story a test; every wait has a deadline, none asserts a speed."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from runs import (
    DEADLINE_S,
    LONG,
    ONE_INSTANCE,
    NewRun,
    Run,
    gated,
    lives,
    of,
    sealed_groups,
    stopped_at_work,
    trained,
)

from psrl.coordinator.records import DROPPED, REQUEUED, Release, Reserve, Start
from psrl.models.tokenizer import load_tokenizer
from psrl.rundir.endpoints import latest_endpoint
from psrl.tasks.base import user_message
from psrl.telemetry.metrics import read_metrics
from psrl.trainer.checkpoints import newest_complete

pytestmark = pytest.mark.process

END_S = 60.0
"""A run that cannot go on ends within this."""


# ---- rollout instances ---------------------------------------------------------------------------------------


def serves_again(run: Run, instance: str, directory: Path) -> None:
    """Wait until an instance that was lost is back, then open the gate and see that it gets new groups."""
    run.until(lambda: run.log("coordinator").count(f"instance {instance} is here") == 2, f"{instance} was back")
    known = len(run.records())
    (directory / "closed").unlink()
    run.until(
        lambda: any(r.instance == instance for r in of(run.records()[known:], Reserve)), f"{instance} served again"
    )


def test_a_killed_instance_hands_its_samples_over_and_is_restarted_as_often_as_allowed(
    new_run: NewRun, tmp_path: Path
) -> None:
    run = new_run(
        {**LONG, **gated(tmp_path), "psrl.fault_tolerance.max_restarts": 1, "trainer.total_training_steps": 16}
    )
    run.start()
    process, lost = stopped_at_work(run, "instance-0")
    (tmp_path / "closed").touch()
    process.kill()
    serves_again(run, "instance-0", tmp_path)
    run.kill("instance-0")
    assert run.wait() == 0
    assert "instance instance-0 ended by signal SIGKILL; it is started again" in run.log("coordinator")
    assert re.search(
        r"samples of \d+ groups were at instance-0: .* with their [1-9]\d* tokens", run.log("agent-loop-0")
    )
    assert run.outcome.counters["deaths/instance"] == 2
    report = run.audit()
    assert report.status == "completed" and report.fates["trained"] == report.reserved == 16 * 4
    assert lost <= {group.group for groups in trained(run.records()).values() for group in groups}
    run.nothing_left()


def test_the_last_instance_ends_the_run_even_if_the_coordinator_forgot_the_others(new_run: NewRun) -> None:
    run = new_run({**LONG, "trainer.total_training_steps": 100})
    run.start()
    run.until(lambda: run.version >= 1, "a step was done")
    run.kill("instance-0")
    run.until(
        lambda: "instance instance-0 ended by signal SIGKILL" in run.log("coordinator"), "the coordinator heard of it"
    )
    run.kill("coordinator")
    run.until(run.steps_from_now(2), "the run went on")
    assert len(run.processes()) > 5
    run.kill("instance-1")
    assert run.wait(END_S) == 1
    run.nothing_left()
    assert run.outcome.status == "failed"
    assert "the last rollout instance is gone: instance-1 ended by signal SIGKILL" in run.outcome.cause
    assert run.outcome.cause in run.output
    run.audit()


def test_hanging_parts_are_passed_over_come_back_and_are_ended_with_the_run(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(
        {
            **LONG,
            **gated(tmp_path),
            "psrl.fault_tolerance.heartbeat_timeout_s": 4,
            "trainer.keep_samples": True,
            "trainer.total_training_steps": 16,
        }
    )
    run.start()
    stopped, lost = stopped_at_work(run, "instance-0")
    (tmp_path / "closed").touch()
    run.until(lambda: "instance instance-0 is gone" in run.log("coordinator"), "it was given up")
    stopped.resume()
    serves_again(run, "instance-0", tmp_path)

    loop = run.kill("agent-loop-0", signal.SIGSTOP)
    run.until(lambda: "agent loop agent-loop-0 is gone" in run.log("coordinator"), "the agent loop was given up")
    loop.resume()
    run.until(run.steps_from_now(1), "the run went on with the same agent loop")
    assert run.find("agent-loop-0") == loop

    stopped.suspend()
    assert run.wait() == 0
    run.nothing_left()
    report = run.audit()
    assert report.fates["trained"] == report.reserved - report.fates["requeued"] == 16 * 4
    assert {reason for _, reason in report.released} <= {"agent_loop_lost"}
    assert lost <= {group.group for groups in trained(run.records()).values() for group in groups} | {
        r.group for r in of(run.records(), Release)
    }
    # What the stopped process made late is in no response: each is whole, without a gap or a token twice.
    for group in sealed_groups(run).values():
        for sample in group.samples:
            ends = [0, *(span.end for span in sample.spans)]
            assert [span.start for span in sample.spans] == ends[:-1] and ends[-1] == 256
            assert len(sample.response_ids) == len(sample.logprobs) == 4 * 256


# ---- coordinator, agent loop, trainer ------------------------------------------------------------------------


def test_coordinator_and_agent_loop_are_restarted_until_their_restarts_are_used_up(new_run: NewRun) -> None:
    run = new_run({**LONG, "psrl.fault_tolerance.coordinator_max_restarts": 1, "trainer.total_training_steps": 20})
    run.start()
    run.until(lambda: run.version >= 1 and run.open_groups(), "groups were in flight")
    run.kill("coordinator")
    run.until(run.steps_from_now(2), "the run went on without its first coordinator")
    assert len(of(run.records(), Start)) == 1, "a coordinator's restart is no new incarnation"

    loop = run.until(lambda: run.find("agent-loop-0"), "there was an agent loop")
    scorers = loop.children()

    def holds_groups() -> bool:
        loop.suspend()
        time.sleep(0.5)  # what it had sent is in the ledger now
        if run.open_groups():
            return True
        loop.resume()
        return False

    assert scorers and run.until(holds_groups, "it had groups in its hands")
    loop.kill()
    run.until(lambda: not any(map(lives, scorers)), "its scoring processes were gone")
    run.until(run.steps_from_now(2), "the run went on with a new agent loop")
    returned = [r for r in of(run.records(), Release) if r.reason == "agent_loop_lost"]
    assert returned and {r.outcome for r in returned} == {REQUEUED}

    run.kill("coordinator")
    assert run.wait(END_S) == 1
    assert run.outcome.cause == "coordinator ended by signal SIGKILL"
    run.nothing_left()

    assert run.launch() == 0
    report = run.audit()
    assert report.status == "completed" and report.fates["dropped"] == 0
    assert [len(groups) for groups in trained(run.records()).values()] == [4] * 20
    assert run.steps() == list(range(1, 21))


def test_a_killed_trainer_rank_costs_no_prompt_and_trains_none_twice(new_run: NewRun) -> None:
    run = new_run(
        {
            **LONG,
            "data.task_params": "{size:96}",
            "psrl.staleness": 1,
            "psrl.staleness_buffer_entries": 8,
            "trainer.total_training_steps": "null",
            "trainer.total_epochs": 1,
            "trainer.keep_samples": True,
            "psrl.deployment.train_ngpus_per_node": 2,
        }
    )
    run.start()
    run.until(lambda: run.version >= 5, "version 5 was published")
    run.kill("trainer-1")
    assert run.wait(END_S) == 1
    assert run.outcome.cause == "trainer-1 ended by signal SIGKILL" and run.outcome.cause in run.output
    run.nothing_left()
    saved, _ = newest_complete(run.dir.checkpoints)
    assert saved is not None

    assert run.launch() == 0
    records = run.records()
    starts = of(records, Start)
    assert [s.incarnation for s in starts] == [0, 1]
    assert saved.name == f"step_{starts[1].version}" and starts[1].version >= 2  # that of 4 may still be in the writing
    buffers = trained(records)
    assert sorted(group.prompt for groups in buffers.values() for group in groups) == list(range(96))
    assert [len(groups) for groups in buffers.values()] == [8] * 12
    assert run.steps() == list(range(1, 13))
    report = run.audit()
    assert report.coordinator_starts == 2 and (report.max_lag or 0) <= 1

    # No stale weights: every token is at least as new as its group's version, those made after the restart as its checkpoint.
    sealed, resumed_at = sealed_groups(run), records.index(starts[1])
    for number, buffer in ((group.group, buffer) for buffer, groups in buffers.items() for group in groups):
        made = next(i for i, r in enumerate(records) if isinstance(r, Reserve) and r.group == number)
        oldest = max(records[made].version, starts[1].version if made > resumed_at else 0)
        versions = {span.version for sample in sealed[number].samples for span in sample.spans}
        assert versions and oldest <= min(versions) and max(versions) <= buffer, (number, buffer, versions)


# ---- the end by the user, and what holds the run together ----------------------------------------------------


def test_ctrl_c_keeps_what_was_done_and_the_same_command_goes_on(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run({**LONG, **ONE_INSTANCE, **gated(tmp_path), "trainer.save_freq": 0})
    run.start()
    run.until(lambda: run.version >= 1, "a step was done")
    (tmp_path / "closed").touch()
    assert run.second_launcher() == 2
    assert f"run_dir={run.dir.path} is in use by process {run.launcher.pid}" in run.output
    run.interrupt()
    assert run.wait(END_S) == 130
    run.nothing_left()
    done = run.version
    assert run.outcome.status == "interrupted" and 1 <= done < 6
    assert run.outcome.cause.startswith("SIGINT at supervisor-")
    saved, _ = newest_complete(run.dir.checkpoints)
    assert saved is not None and saved.name == f"step_{done}"
    (tmp_path / "closed").unlink()

    assert run.launch() == 0
    assert run.outcome.status == "completed" and run.version == 6
    assert [s.version for s in of(run.records(), Start)] == [0, done]

    segments = sorted(run.dir.ledger.iterdir())
    assert run.launch() == 0
    assert f"{run.dir.path} is completed (version 6)" in run.output
    assert run.launch({"psrl.staleness": 2}) == 2
    assert "psrl.staleness=2 differs from the 1 that" in run.output
    assert sorted(run.dir.ledger.iterdir()) == segments, "neither has touched the run"

    assert run.launch({"trainer.total_training_steps": 8}) == 0
    assert run.version == 8 and run.steps() == list(range(1, 9))
    run.audit()

    shutil.rmtree(run.dir.checkpoints)  # a trainer would begin at version 0, whose samples are gone
    run.start({"trainer.total_training_steps": 10})
    assert run.wait(DEADLINE_S) == 1
    assert "trainer-0 cannot go on" in run.outcome.cause and "the ledger can resume from 6 to 8" in run.outcome.cause
    run.nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_launcher_that_ends_while_the_model_is_made_leaves_no_process(
    new_run: NewRun, number: signal.Signals, code: int
) -> None:
    run = new_run({"model": "tiny", "model.tiny.warm_start_steps": 100_000, "model.tiny.warm_start_accuracy": 2})
    run.start()
    run.until(lambda: run.find("psrl.prepare"), "the model was being made")
    run.interrupt(number)
    assert run.wait(END_S) == code
    run.nothing_left()
    assert "Traceback" not in run.output


def test_what_holds_the_run_together_may_die_too(new_run: NewRun) -> None:
    run = new_run({**LONG, **ONE_INSTANCE, "trainer.total_training_steps": 24, "trainer.save_freq": 1})
    # Twice Ctrl-C: a drain that cannot end is cut short.
    run.start()
    run.until(lambda: run.version >= 1, "a step was done")
    run.kill("trainer-0", signal.SIGSTOP)
    run.interrupt()
    run.until(lambda: "draining" in run.output, "the drain had begun")
    run.interrupt()
    assert run.wait(END_S) == 130
    run.nothing_left()
    # A supervisor: its roles die with it, the other side ends, the cause is told.
    for group in ("rollout", "trainer"):
        before = run.version
        run.start()
        run.until(lambda before=before: run.version > before, "the run went on")
        run.kill(f"supervisor-{group}")
        assert run.wait(END_S) == 1
        assert run.outcome.cause == f"supervisor-{group} ended by signal SIGKILL"
        run.nothing_left()
    # The launcher: everything dies with it, and there is no verdict at all.
    before = run.version
    run.start()
    run.until(lambda: run.version > before, "the run went on")
    run.interrupt(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    run.nothing_left()
    assert not run.dir.outcome.exists()

    assert run.launch() == 0
    assert run.audit().status == "completed"
    assert [len(groups) for groups in trained(run.records()).values()] == [4] * 24
    assert run.steps() == list(range(1, 25))


# ---- rewards and data ----------------------------------------------------------------------------------------

ODD_DATA = '''
import pathlib, time
from psrl.tasks.base import TaskItem, user_message

HERE = pathlib.Path(__file__).parent

class Task:
    """The first prompts by name, then plain ones; `texts` are the prompts."""

    def __init__(self, seed, texts):
        self.texts = texts

    def items(self):
        for i, text in enumerate(self.texts):
            name = ("raises", "hangs", "31", "32", "33")[i] if i < 5 else "plain"
            yield TaskItem(messages=user_message(text), data_source="odd", ground_truth=name)

    def score(self, answer):
        return 0.0

def reward(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "raises":
        raise ValueError("no reward for this one")
    if ground_truth == "hangs" and not (HERE / "hung").exists():
        (HERE / "hung").touch()
        time.sleep(3600)
    return float(len(solution_str) % 2)
'''


def prompt_texts(model: Path, lengths: list[int]) -> list[str]:
    """Prompts of exactly so many tokens."""
    tokenizer = load_tokenizer(model)
    bare = len(tokenizer.encode_chat(user_message("")))
    texts = ["x" * (length - bare) for length in lengths]
    assert [len(tokenizer.encode_chat(user_message(text))) for text in texts] == lengths
    return texts


def test_failing_rewards_and_overlong_prompts_are_counted_and_the_rest_is_trained_once(
    new_run: NewRun, tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "odd.py").write_text(ODD_DATA)
    texts = prompt_texts(tiny_model, [10, 10, 31, 32, 33] + [10] * 8)
    overrides: Mapping[str, object] = {
        **ONE_INSTANCE,
        "data.task": "odd:Task",
        "data.task_params": f"{{texts:[{','.join(texts)}]}}",
        "data.max_prompt_length": 31,
        "gen_actor_rollout_ref.rollout.max_model_len": 32,
        "gen_actor_rollout_ref.rollout.ignore_eos": True,
        "data.shuffle": False,
        "data.drop_last": False,
        "trainer.total_training_steps": "null",
        "trainer.total_epochs": 1,
        "trainer.keep_samples": True,
        "psrl.max_group_retries": 1,
        "reward.function": "odd:reward",
        "reward.timeout_s": 10,
    }
    run = new_run(overrides)
    assert run.launch() == 0
    counters = run.outcome.counters
    assert {k: v for k, v in counters.items() if k.startswith(("error", "timeout"))} == {
        "error": 2,
        "error/prompt_0": 2,
        "timeout": 1,
        "timeout/prompt_1": 1,
    }
    assert counters["skipped_prompts"] == 2 and "2 too long" in run.output
    buffers = trained(run.records())
    assert [len(groups) for groups in buffers.values()] == [4, 4, 2], "the tail is drained as one short buffer"
    assert sorted(group.prompt for groups in buffers.values() for group in groups) == list(range(1, 11))
    assert [(r.reason, r.outcome) for r in of(run.records(), Release) if r.outcome == DROPPED] == [("error", DROPPED)]
    edge = next(group for group in sealed_groups(run).values() if group.prompt == 2)
    assert len(edge.prompt_ids) == 4 * 31 and {(len(s.response_ids), s.finish) for s in edge.samples} == {(4, "length")}
    run.audit()


POOR_REWARDS = '''
import itertools, pathlib

CALLS = itertools.count()

def reward(data_source, solution_str, ground_truth, extra_info):
    """NaN for one sample of each group of four; a text once the file is there."""
    if (pathlib.Path(__file__).parent / "text").exists():
        return "1"
    return float("nan") if next(CALLS) % 4 == 2 else float(len(solution_str) % 2)
'''


def test_a_reward_that_is_no_number_is_left_out_and_one_of_another_type_ends_the_run(
    new_run: NewRun, tmp_path: Path
) -> None:
    (tmp_path / "poor.py").write_text(POOR_REWARDS)
    run = new_run(
        {**ONE_INSTANCE, "psrl.rollout_n": 4, "reward.function": "poor:reward", "trainer.total_training_steps": 500}
    )
    run.start()
    run.until(lambda: len(run.steps()) >= 3, "three steps were trained")
    (tmp_path / "text").touch()
    assert run.wait() == 1
    cause = "reward.function=poor:reward returned '1' of type str: a reward must be a number"
    assert cause in run.outcome.cause and cause in run.output
    run.nothing_left()
    for row in read_metrics(run.dir.metrics):
        assert (row["training/num_samples"], row["training/num_masked_samples"]) == (12, 4)
        assert all(row[name] is not None for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"))
        assert row["actor/skipped_steps"] == 0
    run.audit()


def test_data_smaller_than_a_batch_is_refused_with_both_numbers_and_nothing_is_left_behind(new_run: NewRun) -> None:
    run = new_run({"data.task_params": "{size:3}", "psrl.staleness_buffer_entries": 8})
    assert run.launch() == 2
    assert "3 prompts < batch 8" in run.output
    run.nothing_left()
    assert not run.dir.path.exists()


# ---- neighbours ----------------------------------------------------------------------------------------------


@pytest.mark.slow  # three members at once on one node: tests/slurm/test_sweep.py
def test_two_runs_share_a_host(new_run: NewRun) -> None:
    runs = [new_run({**ONE_INSTANCE, "trainer.total_training_steps": 3}, f"run-{i}") for i in range(2)]
    for run in runs:
        run.start()
    assert [run.wait() for run in runs] == [0, 0]
    endpoints = [latest_endpoint(run.dir, "coordinator") for run in runs]
    assert None not in endpoints and len({found[1].address for found in endpoints if found}) == 2
    for run in runs:
        assert run.audit().status == "completed"
