"""Whole runs whose trainers compute on GPUs, with the embedded engine on the CPU: they learn the same, and resume."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from runs import Run

from psrl.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

STEPS = 4
BASE = {
    "trainer.device": "cuda",
    "model.tiny.hidden_size": 64,
    "model.tiny.num_layers": 2,
    "model.tiny.warm_start_steps": 0,
    "psrl.deployment.n_rollout_instances": 1,
    "trainer.total_training_steps": STEPS,
    "train_actor_rollout_ref.actor.use_torch_compile": "False",
}
ACTOR = "train_actor_rollout_ref.actor"
RANKS = "psrl.deployment.train_ngpus_per_node"
RUNS: dict[str, dict[str, object]] = {
    "fsdp2": {},
    "critic-and-reference": {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": "True"},
    "bfloat16-filesystem": {f"{ACTOR}.mixed_precision": "bfloat16", "psrl.ps_mode": "filesystem"},
    "megatron": {f"{ACTOR}.strategy": "megatron"},
    "fsdp2-2": {RANKS: 2},
    "megatron-dp2": {RANKS: 2, f"{ACTOR}.strategy": "megatron"},
    "megatron-pp2": {RANKS: 2, f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size": 2},
}
RESUMED = ("critic-and-reference", "megatron-pp2")


def lacking(name: str) -> str | None:
    """What this machine has not got of what a run needs."""
    if "megatron" in name and importlib.util.find_spec("megatron") is None:
        return "megatron-core is not installed"
    missing = int(str(RUNS[name].get(RANKS, 1))) > torch.cuda.device_count()
    return "there are no two GPUs" if missing else None


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """All of them, started at the same time: what takes long is to start."""
    path = tmp_path_factory.mktemp("runs")
    all_runs = {name: Run(path / name, BASE | changes) for name, changes in RUNS.items() if lacking(name) is None}
    for run in all_runs.values():
        run.start()
    yield all_runs
    for run in all_runs.values():
        run.close()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_on_gpus_and_resumes(name, started):
    if missing := lacking(name):
        pytest.skip(missing)
    run = started[name]
    assert run.wait() == 0, run.story()
    steps = STEPS
    if name in RESUMED:
        steps += 2
        assert run.launch({"trainer.total_training_steps": steps}) == 0, run.story()
    rows = read_metrics(run.dir.metrics)
    assert run.steps() == list(range(1, steps + 1))
    assert all(math.isfinite(row["actor/grad_norm"]) for row in rows)
    limit = 1e-2 if "bfloat16" in name else 1e-4
    assert abs(rows[0]["rollout_corr/kl"]) < limit  # the engine is on the CPU, the weights are the same
    for log in run.dir.logs.glob("trainer-*.log"):
        assert "trainer.device=cuda: NVIDIA" in log.read_text()
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
