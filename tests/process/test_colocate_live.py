"""Whole runs whose trainer and instance take turns on one device: neither works in the other's turn, a death in either heals or ends."""

from __future__ import annotations

from itertools import product

import pytest
from runs import LONG, ONE_INSTANCE, NewRun, Run, stopped_at_work

from psrl.supervisor.node import node_scratch
from psrl.telemetry.metrics import read_metrics
from psrl.telemetry.timeline import BUSY, CHECKPOINT, PUSH, READ, SLEEP, SWITCH, UPDATE, WAKE, Span
from psrl.telemetry.timeline_read import by_name, read_timeline

pytestmark = pytest.mark.process

COLOCATED = {**ONE_INSTANCE, "psrl.colocate": True, "trainer.save_freq": 2}
CLOCK_ERROR_S = 0.02
"""Two processes' clocks agree at least so well; a turn that is not kept overlaps for much longer."""
END_S = 60.0


def spans(run: Run, role: str, names: tuple[str, ...]) -> list[Span]:
    return [s for own in by_name(read_timeline(run.dir.timeline), role).values() for s in own if s.name in names]


def together(run: Run) -> list[tuple[Span, Span]]:
    """Work of the instance and of the trainer at the same time."""
    rollout, train = spans(run, "instance", (BUSY, SWITCH)), spans(run, "trainer", (READ, UPDATE, PUSH, CHECKPOINT))
    assert rollout and train
    return [
        (r, t) for r, t in product(rollout, train) if min(r.end_s, t.end_s) - max(r.start_s, t.start_s) > CLOCK_ERROR_S
    ]


def last_holder(run: Run) -> str:
    found = list(node_scratch(run.dir).glob("gpu-*.turn"))
    return found[0].read_text() if found else ""


def test_a_killed_instance_comes_back_and_neither_side_works_in_the_others_turn(new_run: NewRun) -> None:
    run = new_run(
        {**LONG, **COLOCATED, "psrl.fault_tolerance.max_restarts": 1, "trainer.total_training_steps": 6}, "killed"
    )
    run.start()
    process, lost = stopped_at_work(run, "instance-0")
    process.kill()
    assert run.wait() == 0
    report = run.audit()
    assert report.status == "completed" and lost
    assert run.outcome.counters["deaths/instance"] == 1
    assert run.outcome.counters["interrupted_samples"] > 0, "at staleness 1 a turn ends with samples in the making"
    assert together(run) == []
    assert len(spans(run, "trainer", (SLEEP,))) >= 6 <= len(spans(run, "instance", (WAKE,)))
    assert all(row["timing_s/release_gpu"] >= 0 <= row["timing_s/take_gpu"] for row in read_metrics(run.dir.metrics))
    run.nothing_left()


def test_a_trainer_killed_in_its_turn_ends_the_run_with_the_cause(new_run: NewRun) -> None:
    run = new_run({**LONG, **COLOCATED, "psrl.staleness": 0, "trainer.total_training_steps": 100}, "trainer")
    run.start()
    run.until(lambda: run.version >= 2, "two steps were done")
    run.until(lambda: last_holder(run).startswith("trainer-0"), "the trainer had its turn")
    run.kill("trainer-0")
    assert run.wait(END_S) == 1
    assert run.outcome.cause == "trainer-0 ended by signal SIGKILL"
    run.nothing_left()
