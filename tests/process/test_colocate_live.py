"""Whole runs whose trainer and instance take turns on one device: neither works in the other's turn, a death in either heals or ends."""

from __future__ import annotations

import json
from itertools import product

import pytest
from runs import LONG, ONE_INSTANCE, NewRun, Run, stopped_at_work

from psrl.supervisor.node import node_scratch
from psrl.telemetry.metrics import read_metrics
from psrl.telemetry.timeline import BUSY, CHECKPOINT, PUSH, READ, SLEEP, SWITCH, UPDATE, WAKE

pytestmark = pytest.mark.process

COLOCATED = {
    **LONG,
    **ONE_INSTANCE,
    "psrl.colocate": True,
    "data.synthetic_lengths.mean_tokens": 64,  # a buffer is ready while others are still being made
    "trainer.save_freq": 2,
}
ROUNDED_S = 0.001
Interval = tuple[float, float]
END_S = 60.0


def spans(run: Run, role: str, *names: str) -> list[Interval]:
    """As they were written, on the clock that all processes of a host share."""
    lines = [json.loads(line) for path in run.dir.timeline.glob(f"{role}-*") for line in path.read_text().splitlines()]
    return [(span[1], span[2]) for line in lines for span in line.get("spans", ()) if span[0] in names]


def together(run: Run) -> list[tuple[Interval, Interval]]:
    """Work of the instance and of the trainer at the same time."""
    rollout, train = spans(run, "instance", BUSY, SWITCH), spans(run, "trainer", READ, UPDATE, PUSH, CHECKPOINT)
    assert rollout and train
    return [(r, t) for r, t in product(rollout, train) if min(r[1], t[1]) - max(r[0], t[0]) > ROUNDED_S]


def last_holder(run: Run) -> str:
    found = list(node_scratch(run.dir).glob("gpu-*.turn"))
    return found[0].read_text() if found else ""


def test_a_killed_instance_comes_back_and_neither_side_works_in_the_others_turn(new_run: NewRun) -> None:
    run = new_run({**COLOCATED, "psrl.fault_tolerance.max_restarts": 1, "trainer.total_training_steps": 6}, "killed")
    run.start()
    process, lost = stopped_at_work(run, "instance-0")
    process.kill()
    assert run.wait() == 0
    report = run.audit()
    assert report.status == "completed" and lost
    assert run.outcome.counters["deaths/instance"] == 1
    assert run.outcome.counters["interrupted_samples"] > 0, "at staleness 1 a turn ends with samples in the making"
    assert together(run) == []
    assert len(spans(run, "trainer", SLEEP)) == 6 and len(spans(run, "instance", WAKE)) >= 2
    assert all(row["timing_s/release_gpu"] >= 0 <= row["timing_s/take_gpu"] for row in read_metrics(run.dir.metrics))
    run.nothing_left()


def test_a_trainer_killed_in_its_turn_ends_the_run_with_the_cause(new_run: NewRun) -> None:
    run = new_run({**COLOCATED, "psrl.staleness": 0, "trainer.total_training_steps": 100}, "trainer")
    run.start()
    run.until(lambda: run.version >= 2, "two steps were done")
    run.until(lambda: last_holder(run).startswith("trainer-0"), "the trainer had its turn")
    run.kill("trainer-0")
    assert run.wait(END_S) == 1
    assert run.outcome.cause == "trainer-0 ended by signal SIGKILL"
    run.nothing_left()
