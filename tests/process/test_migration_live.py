"""Sync by status and migration in whole runs: real processes, the embedded engine, long-tailed lengths."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
from runs import DEADLINE_S, NewRun, Run, gated, of, trained

from psrl.coordinator.records import Occupy, Release
from psrl.protocol.generation import FINISH_LENGTH, FINISH_STOP
from psrl.protocol.samples import Group
from psrl.rundir.segments import read_sample
from psrl.telemetry.metrics import read_metrics

pytestmark = pytest.mark.process

STRATEGY = "psrl.rollout_coordination.sync_and_mig_strategy"
MIGRATING: dict[str, object] = {
    "data.task": "longtail_count",
    "data.max_response_length": 256,
    "psrl.staleness": 2,
    "psrl.staleness_buffer_entries": 4,
    "psrl.rollout_n": 4,
    f"{STRATEGY}.method": "status_based",
    f"{STRATEGY}.sync.indicator": "request_num",
    f"{STRATEGY}.sync.threshold": 12,
    f"{STRATEGY}.check_interval_in_ms": 20,
    f"{STRATEGY}.mig.enable": True,
    f"{STRATEGY}.mig.threshold": 3,
    f"{STRATEGY}.mig.stop_threshold": 6,
    "psrl.fault_tolerance.max_restarts": 2,
    "trainer.keep_samples": True,
    "trainer.total_training_steps": 12,
}


def sealed_groups(run: Run) -> list[Group]:
    """Every sealed group, read as a trainer reads it."""
    refs = [record.ref for record in of(run.records(), Occupy)]
    return [
        msgspec.msgpack.decode(read_sample(run.dir.samples, r.segment, r.offset, r.length, r.crc), type=Group)
        for r in refs
    ]


def test_samples_move_to_an_instance_that_came_back_empty_and_none_is_lost_or_made_twice(
    new_run: NewRun, tmp_path: Path
) -> None:
    """While instance-1 is away its samples are at instance-0. It comes back with the newest weights and nothing to do:
    everything at instance-0 is handed back and placed anew."""
    run = new_run(MIGRATING | gated(tmp_path) | {"psrl.fault_tolerance.heartbeat_timeout_s": DEADLINE_S})
    both = {"instance-0", "instance-1"}
    (tmp_path / "closed").touch()
    run.start()
    run.until(lambda: all("weights of" in run.log(name) for name in both), "both instances had their first weights")
    (tmp_path / "closed").unlink()
    run.until(
        lambda: (
            run.version >= 1
            and len(run.open_groups()) >= 6
            and both <= {r.instance for r in run.open_groups().values()}
        ),
        "both instances were at work",
    )
    busy = run.kill("instance-0", signal.SIGSTOP)  # what is there stays there until the other one is back
    run.kill("instance-1")
    back = "instance instance-1 is here"
    run.until(lambda: run.log("coordinator").count(back) >= 2, "instance-1 was back")
    busy.resume()
    assert run.wait() == 0
    run.nothing_left()
    counters = run.outcome.counters
    assert counters["migrations"] >= 1 and counters["migrated_samples"] >= 1, counters
    assert counters["pulls"] >= 12
    assert "the first hands back" in run.log("coordinator")

    report = run.audit()
    assert report.status == "completed" and report.max_lag <= 2
    assert report.fates["trained"] == 12 * 4 and not of(run.records(), Release)
    whole = [sample for group in sealed_groups(run) for sample in group.samples]
    for sample in whole:  # B11: what was interrupted went on, and only what ended was scored
        ends = [0, *(span.end for span in sample.spans)]
        assert [span.start for span in sample.spans] == ends[:-1]
        assert len(sample.response_ids) == len(sample.logprobs) == 4 * ends[-1] <= 4 * 256
        assert sample.finish in (FINISH_STOP, FINISH_LENGTH)
    assert len(trained(run.records())) == 12
    rows = read_metrics(run.dir.metrics)
    assert rows[-1]["rollout/migrations"] >= 1 and rows[-1]["rollout/pulls"] >= 1
