"""Whole runs of a trainer and vLLM on one GPU: weights from device to device in mid-generation, and both in turns."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from runs import ONE_INSTANCE, Run, sealed_groups

from psrl.telemetry.metrics import read_metrics
from psrl.telemetry.timeline import PULL
from psrl.telemetry.timeline_read import read_timeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

STEPS = 4
BASE: dict[str, object] = {
    **ONE_INSTANCE,
    "trainer.device": "cuda",
    "trainer.gpu_memory_fraction": 0.3,
    "trainer.total_training_steps": STEPS,
    "train_actor_rollout_ref.actor.use_torch_compile": "False",
    "train_actor_rollout_ref.actor.mixed_precision": "bfloat16",
    "model.tiny.hidden_size": 256,
    "model.tiny.num_heads": 4,
    "model.tiny.num_layers": 2,
    "model.tiny.warm_start_steps": 0,
    "gen_actor_rollout_ref.rollout.name": "vllm",
    "gen_actor_rollout_ref.rollout.dtype": "bfloat16",
    "gen_actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
    "gen_actor_rollout_ref.rollout.ignore_eos": "True",
    "gen_actor_rollout_ref.rollout.max_num_seqs": 2,  # decoding takes longer than training: pulls meet samples in the making
    "data.max_response_length": 512,
    "trainer.keep_samples": "True",
}
SAVER = pytest.mark.skipif(importlib.util.find_spec("torch_memory_saver") is None, reason="no torch-memory-saver")
TURNS = {
    "psrl.colocate": "True",
    "psrl.staleness": 0,
    "psrl.tms.range": "all",
    "psrl.tms.enable_nixl": "True",
    "psrl.tms.enable_cuda_graph": "True",
}


EXPERTS = {"psrl.staleness": 1, "model.tiny.num_experts": 4, "model.tiny.intermediate_size": 256}


def has_expert_kernels() -> bool:
    return any(importlib.util.find_spec(f"vllm.{name}") for name in ("_moe_C_stable_libtorch", "_moe_C"))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"psrl.staleness": 1}, id="side-by-side"),
        pytest.param(TURNS, id="in-turns", marks=SAVER),
        pytest.param(EXPERTS, id="experts"),
    ],
)
def test_a_run_on_one_gpu_trains_what_its_own_weights_made(changes, tmp_path):
    if changes is EXPERTS and not has_expert_kernels():
        pytest.skip("this vLLM was built without kernels for experts")
    run = Run(tmp_path / "run", {**BASE, **changes})
    try:
        assert run.launch() == 0, run.story()
        rows = list(read_metrics(run.dir.metrics))
        assert len(rows) == STEPS and run.audit().findings == []
        # Stale, torn or misplaced weights would be far from the trainer's: this is what bfloat16 kernels differ by.
        assert abs(rows[0]["rollout_corr/kl"]) < 5e-3
        assert all(row["rollout_corr/k3_kl"] < 1e-2 for row in rows)
        pulls = [
            span.attributes
            for track in read_timeline(run.dir.timeline)
            for span in track.spans
            if span.name == PULL and track.role == "instance"
        ]
        assert len(pulls) >= STEPS and all("one GPU" in pull["transport"] for pull in pulls)
        if changes is TURNS:
            assert run.log("trainer-0").count("GiB of GPU memory are released") == STEPS
            return
        spans = [[s.version for s in sample.spans] for group in sealed_groups(run).values() for sample in group.samples]
        assert all(a < b for versions in spans for a, b in itertools.pairwise(versions))
        assert any(len(versions) > 1 for versions in spans), "no pull met a sample in the making"
    finally:
        run.close()
