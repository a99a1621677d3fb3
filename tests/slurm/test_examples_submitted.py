"""The GSM8K example on the mini Slurm, by both of its ways, with a tiny model in the place of the large one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import DEADLINE_S

from psrl.outcome import read_outcome
from psrl.role import load_config
from psrl.rundir.layout import RunDir
from psrl.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_gsm8k_qwen2.5_3b"
STEPS = 2
SMALL = [
    "psrl.net.interface=lo",
    "psrl.deployment.train_ngpus_per_node=1",
    "psrl.deployment.n_rollout_instances=1",
    "psrl.staleness_buffer_entries=2",
    "psrl.rollout_n=2",
    "data.max_response_length=8",
    "train_actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "train_actor_rollout_ref.actor.mixed_precision=float32",
    "train_actor_rollout_ref.actor.gradient_checkpointing=false",
    "gen_actor_rollout_ref.rollout.name=torch",
    "gen_actor_rollout_ref.rollout.dtype=float32",
    f"trainer.total_training_steps={STEPS}",
]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy, with the directives that the small nodes here need."""
    copy = tmp_path / "mine"
    shutil.copytree(EXAMPLE, copy)
    script = copy / "job.sbatch"
    script.write_text(script.read_text().replace("--cpus-per-task=64", "--cpus-per-task=2"))
    return copy


def start(cluster: Any, here: Path, *command: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    env = cluster.env | {"PSRL_PYTHON": sys.executable}
    done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def prepared(cluster: Any, example: Path) -> str:
    """Prompts for one buffer, prepared as the README says."""
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}={2 * n}.\n#### {2 * n}"} for n in range(4)]
    (example / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = example / "train.parquet"
    start(cluster, example, sys.executable, example / "prepare_gsm8k.py", "train.jsonl", target)
    return f"data.train_files={target}"


def test_both_ways_train_the_same_run(mini_slurm: Any, tiny_model: Path, example: Path, tmp_path: Path) -> None:
    overrides = [f"model={tiny_model}", prepared(mini_slurm, example), *SMALL]
    submitted = start(mini_slurm, example, "sbatch", "--parsable", "job.sbatch", *overrides).stdout
    by_hand = RunDir(example / "runs" / submitted.strip())
    launched = start(mini_slurm, tmp_path, example / "launch.sh", f"run_dir={tmp_path / 'run'}", *overrides).stdout
    by_launcher = RunDir(tmp_path / "run")

    for job in (submitted, launched.split()[2]):
        components = mini_slurm.wait_job_state(int(job), ["COMPLETED", "FAILED"], DEADLINE_S)
        assert [c["Partition"] for c in components] == ["train", "rollout"]
        assert [c["JobState"] for c in components] == ["COMPLETED", "COMPLETED"], mini_slurm.output(int(job))
    for run_dir in (by_hand, by_launcher):
        outcome = read_outcome(run_dir)
        assert outcome is not None and outcome.status == "completed"
        assert [row["training/global_step"] for row in read_metrics(run_dir.metrics)] == list(range(1, STEPS + 1))
    assert replace(load_config(by_hand), run_dir=None) == replace(load_config(by_launcher), run_dir=None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("data.train_files=/nowhere/train.parquet", "data.train_files=/nowhere/train.parquet does not exist"),
        ("model.path=/nowhere/model", "model.path=/nowhere/model is not a directory"),
        ("hydra.launcher.rollout.partition=gpu", "hydra.launcher.rollout.partition=gpu is refused"),
    ],
)
def test_a_wrong_place_is_refused_before_anything_is_submitted(
    mini_slurm: Any, tiny_model: Path, example: Path, tmp_path: Path, wrong: str, said: str
) -> None:
    jobs = ("squeue", "--noheader", "--states=all", "--format=%i")
    before = set(mini_slurm.run(*jobs).stdout.split())
    overrides = [f"model={tiny_model}", prepared(mini_slurm, example), *SMALL, f"run_dir={tmp_path / 'run'}"]
    refused = start(mini_slurm, tmp_path, example / "launch.sh", *overrides, wrong, code=2)
    assert refused.stdout == "" and refused.stderr.splitlines()[-1].startswith(f"psrl: {said}")
    assert set(mini_slurm.run(*jobs).stdout.split()) == before
    assert not (tmp_path / "run").exists()
