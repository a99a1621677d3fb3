"""Whole runs whose instances decode with vLLM: weights switched in mid-generation, and what happens when its processes die."""

from __future__ import annotations

import importlib.util
import itertools
import time

import msgspec
import psutil
import pytest
from runs import ONE_INSTANCE, NewRun, Run, of

from psrl.coordinator.records import Occupy
from psrl.protocol.samples import Group
from psrl.rundir.segments import read_sample
from psrl.telemetry.metrics import read_metrics

pytestmark = [
    pytest.mark.process,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

VLLM: dict[str, object] = {
    **ONE_INSTANCE,
    "model": "tiny",  # with heads that vLLM's CPU kernels can work with
    "model.tiny.hidden_size": 64,
    "model.tiny.num_heads": 2,
    "model.tiny.num_layers": 2,
    "model.tiny.warm_start_steps": 0,
    "gen_actor_rollout_ref.rollout.name": "vllm",
    "gen_actor_rollout_ref.rollout.enforce_eager": "True",
    "gen_actor_rollout_ref.rollout.ignore_eos": "True",
    "data.max_response_length": 96,
    "gen_actor_rollout_ref.rollout.max_num_seqs": 2,  # decoding takes longer than training: pulls meet samples in the making
    "psrl.staleness": 1,
    "trainer.keep_samples": "True",
}
GONE_S = 5.0


def sealed(run: Run) -> list[Group]:
    refs = [record.ref for record in of(run.records(), Occupy)]
    return [
        msgspec.msgpack.decode(read_sample(run.dir.samples, r.segment, r.offset, r.length, r.crc), type=Group)
        for r in refs
    ]


def core_of(run: Run) -> psutil.Process:
    """The engine core of instance-0, once samples are being made."""
    run.until(lambda: run.open_groups(), "groups were in the making")

    def found() -> psutil.Process | None:
        instance = run.find("instance-0")
        below = [] if instance is None else instance.children()
        return next((child for child in below if "EngineCore" in " ".join(child.cmdline())), None)

    return run.until(found, "the engine core was there")


def test_weights_are_switched_in_mid_generation_and_log_probs_agree(new_run: NewRun) -> None:
    run = new_run(VLLM)
    assert run.launch() == 0, run.story()
    report = run.audit()
    assert report.status == "completed" and report.fates["trained"] == 6 * 4
    rows = list(read_metrics(run.dir.metrics))
    assert abs(rows[0]["rollout_corr/kl"]) < 1e-4
    samples = [sample for group in sealed(run) for sample in group.samples]
    spans = [[span.version for span in sample.spans] for sample in samples]
    assert all(a < b for versions in spans for a, b in itertools.pairwise(versions))
    assert any(len(versions) > 1 for versions in spans), "no pull met a sample in the making"
    assert all(sample.spans[-1].end * 4 == len(sample.response_ids) for sample in samples)
    run.nothing_left()


def test_a_killed_core_ends_its_instance_and_a_killed_instance_its_core(new_run: NewRun) -> None:
    run = new_run({**VLLM, "psrl.fault_tolerance.max_restarts": 2, "trainer.total_training_steps": 40})
    run.start()
    core = core_of(run)
    core.kill()
    run.until(lambda: "ended by signal SIGKILL" in run.log("instance-0"), "the instance said why it ends")
    run.until(run.steps_from_now(1), "the run went on with another one")
    core = core_of(run)
    below = [core, *core.children(recursive=True)]
    run.kill("instance-0")
    deadline = time.monotonic() + GONE_S
    while left := [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    run.until(run.steps_from_now(1), "the run went on again")
    run.interrupt()
    assert run.wait() == 130, run.story()
    assert run.audit().findings == []
    run.nothing_left()
