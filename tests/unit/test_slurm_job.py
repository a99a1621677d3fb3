"""From configuration and launcher settings to the text that sbatch reads, compared with recorded scripts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psrl.config.errors import ConfigError
from psrl.config.schema import DeploymentConfig
from psrl.slurm.cluster import Partition, parse_cluster
from psrl.slurm.job_text import END, READ_VERDICT, Job, job_text
from psrl.slurm.plan import plan_job
from psrl.slurm.settings import GroupConf, SlurmConf, check_settings

pytestmark = pytest.mark.unit

RECORDED = Path(__file__).parent / "recorded"
RUN_DIR = Path("/scratch/runs/0")


def conf(**settings: Any) -> SlurmConf:
    made = SlurmConf(**{"submitit_folder": "/scratch/.submitit/%j", "signal_delay_s": 90} | settings)
    check_settings(made)
    return made


def plan(settings: SlurmConf, cluster: dict[str, Partition] | None = None, **deployment: Any) -> Job:
    sizes: dict[str, Any] = {"train_nnodes": 2, "train_ngpus_per_node": 8, "n_rollout_instances": 8} | deployment
    return plan_job(
        DeploymentConfig(**sizes), settings, number=3, run_dir=RUN_DIR, python="/opt/venv/bin/python", cluster=cluster
    )


HET = {
    "trainer": GroupConf(partition="train", account="lab", mem_gb=512, sbatch=["--exclusive"]),
    "rollout": GroupConf(partition="rollout", timeout_min=90, constraint="h100&ib"),
    "setup": ["module load cuda", 'source "$HOME/my venv/bin/activate"'],
    "additional_parameters": {"mail-type": "END", "exclusive": True},
}
CASES: dict[str, tuple[SlurmConf, dict[str, Any]]] = {
    "het.sbatch": (conf(**HET), {"rollout_ngpus_per_node_per_instance": 2}),
    "plain.sbatch": (conf(job="plain", partition="gpu", gpus_per_node=8, time="1-12:00:00"), {"train_nnodes": 1}),
    "single_node.sbatch": (
        conf(job="single_node", partition="gpu", max_requeues=0, stderr_to_stdout=False),
        {"train_nnodes": 1, "train_ngpus_per_node": 4, "n_rollout_instances": 4},
    ),
    "pyxis.sbatch": (
        conf(srun_args=["--container-image=/images/psrl.sqsh", "--container-mounts=/scratch"], python="python"),
        {"train_nnodes": 1},
    ),
    "apptainer.sbatch": (conf(python="apptainer exec --nv /images/psrl.sif python"), {"train_nnodes": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_the_recorded_one(name: str) -> None:
    text = job_text(plan(CASES[name][0], **CASES[name][1]))
    recorded = RECORDED / name
    if os.environ.get("PSRL_RECORD"):
        recorded.write_text(text)
    assert text == recorded.read_text()
    assert subprocess.run(["bash", "-n", str(recorded)]).returncode == 0


def test_a_dependency_holds_the_whole_job() -> None:
    text = job_text(replace(plan(conf()), after="77"))
    first, second = text.split("#SBATCH hetjob")
    assert "#SBATCH --dependency=afterany:77\n" in first and "dependency" not in second


def test_paths_with_blanks_and_percent_signs_survive() -> None:
    text = job_text(replace(plan(conf()), run_dir=Path("/tmp/o ut/a=1,b/100%")))
    assert "#SBATCH --output='/tmp/o ut/a=1,b/100%%/logs/slurm-%j'.out\n" in text
    assert "\nrun_dir='/tmp/o ut/a=1,b/100%'\n" in text


# ---- what the batch script does with a verdict -------------------------------------------------------------------


def verdict(
    tmp_path: Path, content: str | None, restarts: int, most: int = 2, step: str = "true", end: str = END
) -> tuple[int, str]:
    """Exit code and output of the script's end, with an scontrol that tells what it was asked."""
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho scontrol $@\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    if content is not None:
        (tmp_path / "outcome.json").write_text(content)
    script = f"run_dir={tmp_path}\nmax_requeues={most}\nPSRL_ATTEMPT=7-{restarts}\n{READ_VERDICT}\n{step} &\n{end}"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout


def outcome(status: str, attempt: str) -> str:
    return f'{{\n "status": "{status}",\n "cause": "say \\"status\\": \\"completed\\"",\n "version": 3,\n "attempt": "{attempt}"\n}}'


def test_a_completed_run_ends_the_job_well(tmp_path: Path) -> None:
    assert verdict(tmp_path, outcome("completed", "7-0"), 0) == (0, "")


def test_a_drained_run_requeues_the_whole_job(tmp_path: Path) -> None:
    code, said = verdict(tmp_path, outcome("interrupted", "7-1"), 1)
    assert "scontrol requeue 7" in said and code == 1  # this scontrol fails


def test_requeues_are_counted(tmp_path: Path) -> None:
    code, said = verdict(tmp_path, outcome("interrupted", "7-2"), 2)
    assert (code, "scontrol" in said) == (1, False)
    assert "not requeued after 2 of at most 2 times" in said


@pytest.mark.parametrize("content", [outcome("failed", "7-0"), outcome("interrupted", "7-1"), "{", None])
def test_a_failed_run_an_old_verdict_and_none_do_not_requeue(tmp_path: Path, content: str | None) -> None:
    code, said = verdict(tmp_path, content, 0)
    assert (code, "scontrol" in said) == (1, False)


def test_a_step_that_outlives_its_verdict_is_left(tmp_path: Path) -> None:
    impatient = END.replace("-lt 120", "-lt 1")
    assert impatient != END
    code, said = verdict(tmp_path, outcome("interrupted", "7-0"), 0, step="sleep 300", end=impatient)
    assert "scontrol requeue 7" in said and code == 1


# ---- refusals ----------------------------------------------------------------------------------------------------

CLUSTER = parse_cluster(
    "PartitionName=train Default=YES MaxTime=04:00:00 DefaultTime=NONE MaxNodes=UNLIMITED Nodes=n[1-2] State=UP\n",
    "NodeName=n1 CPUTot=4 RealMemory=5000 Gres=(null) State=IDLE Partitions=train\n"
    "NodeName=n2 CPUTot=4 RealMemory=5000 Gres=(null) State=IDLE Partitions=train\n",
)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tasks_per_node": 8}, "hydra.launcher.tasks_per_node=8 is refused: there is one task a node"),
        ({"gpus_per_task": 1}, "hydra.launcher.gpus_per_task=1 is refused: it breaks CUDA IPC"),
        ({"max_num_timeout": 3}, "max_num_timeout=3 is refused: use max_requeues"),
        ({"array_parallelism": 4}, "cannot be an array; use max_parallel_jobs"),
        ({"nodes": 4}, "hydra.launcher.nodes=4 is refused: psrl.deployment decides"),
        ({"job": "array"}, r"hydra.launcher.job=array is refused: allowed is het \| plain \| single_node"),
        ({"max_parallel_jobs": 0}, "max_parallel_jobs=0 is refused: it must be at least 1"),
        ({"max_requeues": -1}, "max_requeues=-1 is refused"),
        ({"sbatch": ["--no-kill"]}, "hydra.launcher.sbatch has --no-kill: a lost node would leave half"),
        ({"sbatch": ["exclusive"]}, "each entry is a flag"),
        ({"additional_parameters": {"no_kill": True}}, "additional_parameters has --no-kill"),
        ({"trainer": GroupConf(sbatch=["--array=0-3"])}, "trainer.sbatch has --array=0-3: a heterogeneous job cannot"),
        ({"timeout_min": 0}, "hydra.launcher.timeout_min=0 is refused"),
        ({"time": "soon"}, "hydra.launcher.time=soon"),
        ({"trainer": GroupConf(time="1:60:00:00")}, "hydra.launcher.trainer.time=1:60:00:00"),
        ({"timeout_min": 3, "signal_delay_s": 120}, "signal_delay_s=120 is refused: .* at most half of the time limit"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        conf(**settings)


@pytest.mark.parametrize(
    ("settings", "deployment", "said"),
    [
        ({"partition": "gpu"}, {}, "hydra.launcher.trainer.partition=gpu"),
        ({"trainer": GroupConf(nodes=4)}, {}, "hydra.launcher.trainer.nodes=4 is refused: psrl.deployment asks for 2"),
        ({}, {"train_nnodes": 3}, "hydra.launcher.trainer.nodes=3 is refused: partition train has 2"),
        ({}, {}, "The job needs 3 nodes of partition train, which has 2"),
        (
            {"timeout_min": 600},
            {},
            "hydra.launcher.trainer.time=10:00:00 is refused: partition train has MaxTime 04:00:00",
        ),
        ({"cpus_per_task": 64}, {}, "hydra.launcher.trainer.cpus_per_task=64 is refused"),
        ({"gpus_per_node": 8}, {}, "hydra.launcher.trainer.gpus_per_node=8"),
    ],
)
def test_requests_that_the_cluster_cannot_meet_are_refused(
    settings: dict[str, Any], deployment: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(conf(**settings), CLUSTER, **deployment)


def test_gpus_are_asked_for_where_there_are_any() -> None:
    assert [c.gpus_per_node for c in plan(conf(), None).components] == [8, 8]
    assert [c.gpus_per_node for c in plan(conf(), CLUSTER, train_nnodes=1).components] == [None, None]
    assert [c.cpus_per_task for c in plan(conf(), CLUSTER, train_nnodes=1).components] == [4, 4]
