"""Mixtures of experts in whole runs: trained, generated from, written out as others read them (over ranks: test_backends.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import DEADLINE_S, NewRun
from safetensors import safe_open
from vllm_runs import EVERY_VERSION, every_step_learns, made, weights_of_versions, widest_gap

from psrl.telemetry.metrics import read_metrics

pytestmark = pytest.mark.process

TINY: dict[str, object] = {
    "model": "tiny",
    "model.tiny.hidden_size": 64,
    "model.tiny.num_layers": 2,
    "model.tiny.num_experts": 4,
    "model.tiny.warm_start_steps": 0,
}


ACTOR = "train_actor_rollout_ref.actor"
TRAINERS = {
    "fsdp2": {},
    "megatron": {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.expert_model_parallel_size": 2},
}


@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_on_two_trainer_ranks_makes_every_token_with_the_weights_of_its_version(
    new_run: NewRun, tmp_path: Path, trainer: str
) -> None:
    if trainer == "megatron":
        pytest.importorskip("megatron.core")
    run = new_run({
        **TINY,
        **TRAINERS[trainer],
        **EVERY_VERSION,
        **every_step_learns(tmp_path),
        "psrl.deployment.train_ngpus_per_node": 2,
        "psrl.weights.route": "nixl",
        "trainer.total_training_steps": 3,
        "trainer.keep_samples": True,
        f"{ACTOR}.optim.lr": 1e-2,
    })  # fmt: skip
    run.start()
    assert run.wait(2 * DEADLINE_S) == 0, run.story()
    directories, samples = weights_of_versions(run), made(run)
    versions = {int(v) for sample in samples for v in sample.versions}
    assert len(versions) > 1
    for version in versions:
        assert widest_gap(samples, version, directories[version]) < 1e-4
        others = [widest_gap(samples, version, path) for other, path in directories.items() if other != version]
        assert min(others) > 1e-3, "the versions do not differ: nothing is shown"
    assert all(abs(row["rollout_corr/kl"]) < 1e-4 for row in read_metrics(run.dir.metrics) if row["staleness/max"] == 0)


def test_exported_files_have_the_experts_one_by_one_like_those_that_the_run_began_with(new_run: NewRun) -> None:
    run = new_run({**TINY, "trainer.total_training_steps": 1, "trainer.save_freq": 1})
    run.start()
    assert run.wait() == 0, run.story()
    begun, exported = weights_of_versions(run).values()
    with (
        safe_open(exported / "model.safetensors", "pt") as ours,
        safe_open(begun / "model.safetensors", "pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
        assert "model.layers.1.mlp.experts.3.gate_proj.weight" in ours.keys()  # noqa: SIM118 (it is no mapping)
