"""Whole runs whose instances decode with vLLM: weights switched in mid-generation, and every token by the version that it is said to be of."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from runs import DEADLINE_S, NewRun, Run
from vllm_runs import (
    EVERY_VERSION,
    REAL_VLLM,
    VLLM,
    each_version_made_its_tokens,
    every_step_learns,
    hold_samples_until_a_version_is_there,
    made,
)

from psrl.telemetry.metrics import read_metrics

pytestmark = REAL_VLLM

NIXL = {"psrl.weights.route": "nixl"}
"""As between hosts, though trainer and instance are on one."""
SMOLLM2: dict[str, object] = {
    **NIXL,
    "model": "smollm2_135m",
    "data.max_prompt_length": 128,
    "data.max_response_length": 64,
    "train_actor_rollout_ref.actor.optim.lr": 1e-5,
    "gen_actor_rollout_ref.rollout.kv_cache_tokens": 1024,
    "psrl.staleness_buffer_entries": 2,
    "trainer.total_training_steps": 2,
}
TWO_WORKERS: dict[str, object] = {
    "gen_actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "psrl.deployment.rollout_ngpus_per_node_per_instance": 2,
    "data.max_response_length": 160,
}
"""Each holds its slice of every layer."""
EXPERTS: dict[str, object] = {**TWO_WORKERS, **NIXL, "model.tiny.num_experts": 4}


def widest_gap_of_the_trainer(run: Run, step: int = 1) -> float:
    """Largest |log p_train - log p_rollout| of a token, by the log-probs that the trainer computed for the step: importance weights are
    ratios of single tokens here, and cut off at 2."""
    row = list(read_metrics(run.dir.metrics))[step - 1]
    assert row["staleness/max"] == 0, "it trained on what older weights had made"
    low, high = row["rollout_corr/rollout_is_min"], row["rollout_corr/rollout_is_max"]
    assert 0 < low <= high
    return max(-math.log(low), math.log(high))


@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize(
    ("settings", "transport", "held"),
    [
        pytest.param(NIXL, "nixl", False, id="tiny"),
        pytest.param(SMOLLM2, "nixl", True, id="smollm2"),  # it trains longer than it decodes
        pytest.param(TWO_WORKERS, "shm", False, id="two-workers"),
        pytest.param(EXPERTS, "nixl", True, id="experts-on-two-workers"),
    ],
)
def test_weights_are_switched_in_mid_generation_and_log_probs_agree(
    new_run: NewRun, tmp_path: Path, settings: dict[str, object], transport: str, held: bool
) -> None:
    run = new_run({**VLLM, **EVERY_VERSION, **every_step_learns(tmp_path), **settings})
    run.start()
    if held:
        hold_samples_until_a_version_is_there(run)
    assert run.wait(2 * DEADLINE_S) == 0, run.story()
    report = run.audit()
    steps, groups = (
        int(str(run.overrides[f])) for f in ("trainer.total_training_steps", "psrl.staleness_buffer_entries")
    )
    assert report.status == "completed" and report.fates["trained"] == steps * groups
    assert json.loads(run.dir.summary.read_text())["transport"].split()[0] == transport
    assert any(len(sample.versions.unique()) > 1 for sample in made(run)), "no pull met a sample in the making"
    assert widest_gap_of_the_trainer(run) < 1e-4
    assert each_version_made_its_tokens(run)[0] == 0
    run.nothing_left()
    shutil.rmtree(run.dir.path)  # with SmolLM2 it holds gigabytes
