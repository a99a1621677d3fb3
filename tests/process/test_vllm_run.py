"""Whole runs whose instances decode with vLLM: weights switched in mid-generation, and what happens when its processes die."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Collection
from contextlib import suppress

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


def sealed(run: Run) -> list[Group]:
    refs = [record.ref for record in of(run.records(), Occupy)]
    return [
        msgspec.msgpack.decode(read_sample(run.dir.samples, r.segment, r.offset, r.length, r.crc), type=Group)
        for r in refs
    ]


def engine_of(run: Run, besides: Collection[psutil.Process] = ()) -> tuple[psutil.Process, psutil.Process]:
    """The engine core of instance-0, another one than those that are gone, and its worker; samples are being made."""

    def named(parent: psutil.Process, word: str) -> list[psutil.Process]:
        return [child for child in parent.children() if word in " ".join(child.cmdline()) and child not in besides]

    def found() -> tuple[psutil.Process, psutil.Process] | None:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            instance = run.find("instance-0")
            for core in named(instance, "EngineCore") if instance else []:
                for worker in named(core, "Worker"):
                    return core, worker
        return None

    engine = run.until(found, "the engine core and its worker were there")
    run.until(lambda: run.open_groups(), "groups were in the making")
    return engine


def all_gone(processes: Collection[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


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


def test_killed_workers_and_cores_end_their_instance_and_a_killed_instance_ends_them(new_run: NewRun) -> None:
    run = new_run(
        {
            **VLLM,
            "gen_actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": "mp",
            "psrl.fault_tolerance.max_restarts": 3,
            "trainer.total_training_steps": 40,
        }
    )
    run.start()
    core, worker = engine_of(run)
    gone = [core, worker]
    worker.kill()
    run.until(lambda: "vLLM's engine core" in run.log("instance-0"), "the instance said why it ends")
    run.until(run.steps_from_now(1), "the run went on with another one")
    core, worker = engine_of(run, besides=gone)
    gone += [core, worker]
    core.kill()
    run.until(lambda: "ended by signal SIGKILL" in run.log("instance-0"), "the instance said why it ends")
    core, worker = engine_of(run, besides=gone)
    gone += [core, worker, *core.children(recursive=True)]
    run.kill("instance-0")
    run.until(lambda: all_gone(gone), "nothing was left of the three engines")
    run.interrupt()
    assert run.wait() == 130, run.story()
    assert run.audit().findings == []
    run.nothing_left()
