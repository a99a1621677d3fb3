"""More is launched than trains, and not all of it is kept: redundancy, filters, stragglers and interrupted samples in
whole runs. What a run directory holds must account for every sample."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from runs import ONE_INSTANCE, NewRun, Run, of, trained

from psrl.coordinator.records import DROPPED, REQUEUED, Occupy, Release, Reserve
from psrl.models.resolve import run_model
from psrl.protocol.samples import Group
from psrl.rundir.segments import read_sample
from psrl.telemetry.metrics import read_metrics

pytestmark = pytest.mark.process

COORDINATION = "psrl.rollout_coordination"
LONG_TAILED: dict[str, object] = {
    "data.task": "longtail_count",
    "data.max_response_length": 192,
    "trainer.keep_samples": True,
}
"""The model is untrained, so that a response ends by chance: most are short, a few use up the budget."""
BOTH_LEVELS: dict[str, object] = {
    f"{COORDINATION}.redundant_rollout.enable": True,
    f"{COORDINATION}.redundant_rollout.redundant_global_batch_size": 6,
    f"{COORDINATION}.redundant_rollout.redundant_rollout_n": 4,
}
"""4 groups of 2 samples train, 6 of 4 are launched."""


def sealed_groups(run: Run) -> dict[int, Group]:
    """Every sealed group by number, read as a trainer reads it."""
    groups: dict[int, Group] = {}
    for record in of(run.records(), Occupy):
        ref = record.ref
        groups[record.group] = msgspec.msgpack.decode(
            read_sample(run.dir.samples, ref.segment, ref.offset, ref.length, ref.crc), type=Group
        )
    return groups


def gave_way(run: Run) -> Counter[tuple[int, int]]:
    """How often each prompt was taken back for others."""
    records = run.records()
    prompts = {r.group: (r.data_epoch, r.prompt) for r in of(records, Reserve)}
    return Counter(prompts[r.group] for r in of(records, Release) if r.reason in ("redundant", "straggler"))


def check_samples(run: Run) -> None:
    """Aborted samples are never sealed: each has an end of its own, EOS after "stop" only, and is whole."""
    eos = set(run_model(run.dir).eos_token_ids)
    for group in sealed_groups(run).values():
        assert len(group.samples) == 2
        for sample in group.samples:
            ids = np.frombuffer(sample.response_ids, dtype="<i4")
            assert sample.finish in ("stop", "length", "truncated") and len(sample.logprobs) == 4 * len(ids)
            assert [int(i) in eos for i in ids] == [False] * (len(ids) - 1) + [sample.finish == "stop"]
            assert len(ids) == 192 or sample.finish != "length"
            assert sum(span.end - span.start for span in sample.spans) == len(ids)


def test_more_groups_and_samples_than_train(new_run: NewRun) -> None:
    run = new_run({**LONG_TAILED, **BOTH_LEVELS, "psrl.staleness": 1, "trainer.total_training_steps": 8})
    assert run.launch() == 0
    report = run.audit()
    assert report.status == "completed" and report.fates["trained"] == 8 * 4
    assert [len(groups) for groups in trained(run.records()).values()] == [4] * 8
    assert report.released[REQUEUED, "redundant"] > 0
    assert set(report.released) == {(REQUEUED, "redundant")}
    assert max(gave_way(run).values()) == 1
    check_samples(run)
    counters = run.outcome.counters
    assert counters["redundant"] == report.released[REQUEUED, "redundant"]
    consumed = 2 * (report.fates["trained"] + report.fates["waiting"])
    assert counters["samples/consumed"] in (consumed, consumed - 2), "the last acknowledgement may be on its way"
    assert counters["samples/redundant"] >= counters["samples/consumed"] // 2
    ended = sum(count for name, count in counters.items() if name.startswith("samples/") and name != "samples/launched")
    assert 0 < ended <= counters["samples/launched"] == 4 * report.reserved
    rows = read_metrics(run.dir.metrics)
    assert all(row["training/num_samples"] == 8 for row in rows)
    run.nothing_left()


PATTERN = '''
import pathlib, time
from collections import Counter
from psrl.tasks.base import TaskItem, user_message

SEEN = Counter()

class Task:
    """Prompts by number; those in `flat` get the same reward for each sample."""

    def __init__(self, seed, size):
        self.size = size

    def items(self):
        for i in range(self.size):
            yield TaskItem(messages=user_message(f"{i}"), data_source="pattern", ground_truth=str(i))

    def score(self, answer):
        return 0.0

def reward(data_source, solution_str, ground_truth, extra_info):
    SEEN[ground_truth] += 1
    return 1.0 if int(ground_truth) in (0, 2, 4) else float(SEEN[ground_truth] % 2)

def flat(data_source, solution_str, ground_truth, extra_info):
    SEEN[ground_truth] += 1
    return {"score": float(SEEN[ground_truth] % 2), "acc": 1.0}

def failing(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "1":
        raise ValueError("no reward for this one")
    hung = pathlib.Path(__file__).with_name("hung")
    if ground_truth == "3" and not hung.exists():
        hung.touch()
        time.sleep(3600)
    SEEN[ground_truth] += 1
    return float(SEEN[ground_truth] % 2)
'''


def filtered(tmp_path: Path, function: str, size: int) -> dict[str, object]:
    (tmp_path / "pattern.py").write_text(PATTERN)
    return {
        **ONE_INSTANCE,
        "data.task": "pattern:Task",
        "data.task_params": f"{{size:{size}}}",
        "data.shuffle": False,
        "psrl.staleness": 0,
        "psrl.group_post_process.enable": True,
        "reward.function": f"pattern:{function}",
        "gen_actor_rollout_ref.rollout.ignore_eos": True,
    }


def test_groups_without_signal_are_replaced_before_the_batch_is_cut(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run({**filtered(tmp_path, "reward", 16), "trainer.total_training_steps": 1})
    assert run.launch() == 0
    (batch,) = trained(run.records()).values()
    assert sorted(group.prompt for group in batch) == [1, 3, 5, 6]
    report = run.audit()
    assert report.released == {(DROPPED, "filtered"): 3} and run.outcome.counters["filtered"] == 3
    assert run.outcome.counters["samples/filtered"] == 6


def test_a_run_in_which_no_group_has_signal_ends_and_says_why(new_run: NewRun, tmp_path: Path) -> None:
    limits = {"algorithm.filter_groups.metric": "acc", "algorithm.filter_groups.max_num_gen_batches": 2}
    run = new_run({**filtered(tmp_path, "flat", 64), **limits})
    assert run.launch() == 1
    cause = run.outcome.cause
    assert "0 of 9 groups" in cause and "metric=acc" in cause
    assert "algorithm.filter_groups.max_num_gen_batches=2" in cause and cause in run.output
    run.nothing_left()
    run.audit()


def test_failing_rewards_under_redundancy_are_retried_dropped_and_replaced(new_run: NewRun, tmp_path: Path) -> None:
    changes = {
        "psrl.group_post_process.enable": False,
        "psrl.staleness": 1,
        "psrl.max_group_retries": 1,
        "reward.timeout_s": 10,
        "gen_actor_rollout_ref.rollout.ignore_eos": False,
        "trainer.total_training_steps": "null",
        "trainer.total_epochs": 1,
        "data.drop_last": False,
    }
    run = new_run({**filtered(tmp_path, "failing", 17), **BOTH_LEVELS, **changes})
    assert run.launch() == 0
    counters = run.outcome.counters
    assert (counters["error"], counters["error/prompt_1"]) == (2, 2) and (tmp_path / "hung").exists()
    assert counters.get("timeout/prompt_3", 0) == counters.get("timeout", 0) <= 1, "or it gave way while it hung"
    batches = [[group.prompt for group in groups] for groups in trained(run.records()).values()]
    assert [len(batch) for batch in batches] == [4] * 4
    assert sorted(prompt for batch in batches for prompt in batch) == [0, *range(2, 17)]
    assert run.audit().released[DROPPED, "error"] == 1
    assert max(gave_way(run).values(), default=0) <= 1


UNEVEN = '''
from psrl.tasks.base import TaskItem, user_message

class Task:
    """A prompt that nearly fills the context, so that its answers are short, and one that leaves all of it, in turn."""

    def __init__(self, seed, size):
        self.size = size

    def items(self):
        for i in range(self.size):
            yield TaskItem(messages=user_message("x" * (1 if i % 2 else 960)), data_source="uneven", ground_truth="")

    def score(self, answer):
        return float(len(answer.solution_str) % 7)
'''


@pytest.mark.parametrize("method", ["truncate", pytest.param("retry", marks=pytest.mark.slow)])
def test_long_answers_that_the_trainer_waits_for(new_run: NewRun, tmp_path: Path, method: str) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    run = new_run(
        {
            **ONE_INSTANCE,
            "data.task": "uneven:Task",
            "data.task_params": "{size:8}",
            "data.shuffle": False,
            "data.max_prompt_length": 1000,
            "data.max_response_length": 900,
            "gen_actor_rollout_ref.rollout.max_model_len": 1024,
            "gen_actor_rollout_ref.rollout.ignore_eos": True,
            f"{COORDINATION}.proactive_filter_strategy.method": method,
            f"{COORDINATION}.proactive_filter_strategy.threshold": 0.5,
            "psrl.staleness": 0,
            "trainer.keep_samples": True,
            "trainer.total_training_steps": 2,
        }
    )
    assert run.launch() == 0
    report, counters, sealed = run.audit(), run.outcome.counters, sealed_groups(run)
    assert [len(groups) for groups in trained(run.records()).values()] == [4, 4]
    assert all(0 < len(s.response_ids) // 4 <= 900 for group in sealed.values() for s in group.samples)
    if method == "truncate":
        assert counters["truncated"] == 4 and report.fates["trained"] == report.reserved == 8
        finishes = {(g.prompt % 2, s.finish) for g in sealed.values() for s in g.samples}
        assert finishes == {(0, "length"), (1, "truncated")}
    else:
        assert counters["retried"] == report.released[REQUEUED, "straggler"] == 4
        assert gave_way(run) == {(0, prompt): 1 for prompt in (1, 3, 5, 7)}
        assert {s.finish for group in sealed.values() for s in group.samples} == {"length"}


def test_what_was_made_before_an_interruption_counts_as_prompt(new_run: NewRun) -> None:
    run = new_run(
        {
            **ONE_INSTANCE,
            "data.max_response_length": 192,
            "gen_actor_rollout_ref.rollout.ignore_eos": True,
            "trainer.keep_samples": True,
            f"{COORDINATION}.partial_rollout.interrupt_as_prompt": True,
            "psrl.staleness": 2,
            "trainer.total_training_steps": 8,
        }
    )
    assert run.launch() == 0
    sealed = sealed_groups(run)
    interrupted = 0
    for sample in (s for group in sealed.values() for s in group.samples):
        start = sample.spans[-1].start
        assert len(sample.response_ids) == 4 * 192 and sample.finish == "length"
        if start:
            interrupted += 1
            mask = np.frombuffer(sample.mask, dtype=np.uint8)
            assert not mask[:start].any() and mask.any() and len(mask) == 192
    assert interrupted > 0
    for row, groups in zip(read_metrics(run.dir.metrics), trained(run.records()).values(), strict=True):
        samples = [sample for group in groups for sample in sealed[group.group].samples]
        trainable = sum(sum(s.mask) if s.mask else len(s.response_ids) // 4 for s in samples)
        assert row["actor/loss_tokens"] == trainable
    run.audit()
