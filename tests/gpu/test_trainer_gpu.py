"""Whole runs whose trainers compute on GPUs, with the embedded engine on the CPU: they learn the same, and resume."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from runs import Run

from psrl.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

MEGATRON = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
BASE = {
    "trainer.device": "cuda",
    "model.tiny.hidden_size": 64,
    "model.tiny.num_layers": 2,
    "model.tiny.warm_start_steps": 0,
    "psrl.deployment.n_rollout_instances": 1,
    "trainer.total_training_steps": 4,
    "train_actor_rollout_ref.actor.use_torch_compile": "False",
}
ACTOR = "train_actor_rollout_ref.actor"


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**overrides: object) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", BASE | overrides))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


RUNS = [
    pytest.param({}, id="fsdp2"),
    pytest.param({"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": "True"}, id="critic-and-reference"),
    pytest.param({f"{ACTOR}.mixed_precision": "bfloat16", "psrl.ps_mode": "filesystem"}, id="bfloat16-filesystem"),
    pytest.param({f"{ACTOR}.strategy": "megatron"}, marks=MEGATRON, id="megatron"),
    pytest.param({"psrl.deployment.train_ngpus_per_node": 2}, marks=TWO, id="fsdp2-2"),
    pytest.param(
        {"psrl.deployment.train_ngpus_per_node": 2, f"{ACTOR}.strategy": "megatron"}, marks=[TWO, MEGATRON], id="megatron-dp2"
    ),
    pytest.param(
        {
            "psrl.deployment.train_ngpus_per_node": 2,
            f"{ACTOR}.strategy": "megatron",
            f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
        },
        marks=[TWO, MEGATRON],
        id="megatron-pp2",
    ),
]  # fmt: skip


@pytest.mark.parametrize("overrides", RUNS)
def test_a_run_trains_on_gpus_and_resumes(new_run, overrides):
    run = new_run(**overrides)
    assert run.launch() == 0, run.story()
    assert run.launch({"trainer.total_training_steps": 6}) == 0, run.story()
    rows = read_metrics(run.dir.metrics)
    assert run.steps() == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(row["actor/grad_norm"]) for row in rows)
    limit = 1e-4 if f"{ACTOR}.mixed_precision" not in overrides else 1e-2
    assert abs(rows[0]["rollout_corr/kl"]) < limit  # the engine is on the CPU, the weights are the same
    for rank in range(int(overrides.get("psrl.deployment.train_ngpus_per_node", 1))):
        assert "trainer.device=cuda: NVIDIA" in run.log(f"trainer-{rank}")
    run.audit()


def test_the_share_of_the_memory_is_kept(tmp_path):
    code = (
        "import torch; from psrl.trainer.device import take_device; device = take_device('auto', 0.05)\n"
        "total = torch.cuda.get_device_properties(device).total_memory\n"
        "torch.empty(total // 25, dtype=torch.uint8, device=device)\n"
        "try: torch.empty(total // 10, dtype=torch.uint8, device=device)\n"
        "except torch.cuda.OutOfMemoryError: print('kept')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "kept\n", done.stderr
