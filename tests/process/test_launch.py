"""The front door as a user meets it: help, composition, sweeps, and bad input in one sentence before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def psrl(cwd: Path, *args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "psrl.launch", *args], cwd=cwd, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["psrl.staleness=-1"], ["psrl.staleness=-1", "at least 0"]),
        (["psrl.staleness=[0,1,2]"], ["psrl.staleness=[0,1,2]", "an integer"]),
        (["psrl.stalenes=1"], ["psrl.stalenes", "did you mean psrl.staleness"]),
        (["rollout.name=vllm"], ["Unknown key rollout.name", "did you mean gen_actor_rollout_ref.rollout.name?"]),
        (["+rollout.name=vllm"], ["Unknown key rollout.name", "did you mean gen_actor_rollout_ref.rollout.name?"]),
        (["enable=True"], ["Unknown key enable", "--help"]),
        (["--stalenes=1"], ["--stalenes=1", "KEY=VALUE"]),
        (["data.reasoning_gym.size=16"], ["16 prompts < batch 32", "psrl.staleness_buffer_entries"]),
        (["data.max_prompt_length=4"], ["no usable prompt", "data.max_prompt_length=4"]),
        (["data.max_prompt_length=4", "data.truncation=error"], ["9 tokens", "data.max_prompt_length=4", "data.truncation=skip"]),
        (["gen_actor_rollout_ref.rollout.max_model_len=9", "data.max_prompt_length=8"], ["no usable prompt"]),
        (["model=/no/such/model"], ["model.path=/no/such/model", "not a directory"]),
        (["model=hf"], ["model.path"]),
        (["model.tiny.num_experts=1"], ["model.tiny.num_experts=1", "at least 2"]),
        (["psrl.log_prob.enable_rollout_engine_log_prob=False"], ["algorithm.rollout_correction.rollout_is", "enable_rollout_engine_log_prob=False"]),
        (["data.reasoning_gym.dataset=chain_some"], ["chain_some", "chain_sum"]),
        (["data.reasoning_gym.params={terms: 3}"], ["terms"]),
        (["reward.function=no_such_module:score"], ["reward.function=no_such_module:score", "no_such_module"]),
        (["run_dir=/proc/psrl"], ["run_dir=/proc/psrl"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_sentence_and_leaves_nothing(
    tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    result = psrl(tmp_path, "preset=laptop", "model.tiny.warm_start_steps=0", *overrides)
    assert result.returncode == 2, result.stdout + result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("psrl: ")]
    assert len(said) == 1, result.stderr
    for word in words:
        assert word in said[0]
    assert "Traceback" not in result.stderr
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_help_and_composition(tmp_path: Path) -> None:
    text = psrl(tmp_path, "--help").stdout
    assert "psrl.staleness = 0" in text and "Most versions that a group may lag" in text and "run_dir" in text
    composed = psrl(tmp_path, "--cfg", "job", "preset=laptop", "psrl.staleness=2").stdout
    assert "  staleness: 2" in composed and "rollout_n: 8" in composed
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_runs_every_member_in_a_directory_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    result = psrl(
        tmp_path, "-m", "preset=laptop", "psrl.staleness=0,1", "psrl.staleness_buffer_entries=4", "psrl.rollout_n=2", "trainer.total_training_steps=2",
        "psrl.deployment.n_rollout_instances=1", f"model={tiny_model}", "trainer.logger=[console]", "trainer.report=False", 'note="a,b"', timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    configs = sorted(p.read_text() for p in (tmp_path / "multirun").glob("*/*/[01]/config.yaml"))
    assert len(configs) == 2
    assert {line for text in configs for line in text.splitlines() if line.strip().startswith("staleness:")} == {
        "  staleness: 0",
        "  staleness: 1",
    }
    assert all("note: a,b" in text for text in configs)
