"""A sweep is one heterogeneous job a member: right nodes, right roles, all complete, one report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import DEADLINE_S
from sweeps import hurry, launch, paced

from psrl.rundir.publish import read_published

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

SWEEP: dict[str, object] = {
    "psrl.staleness": "0,1",
    "psrl.rollout_coordination.partial_rollout.enable": "True,False",
    "psrl.deployment.n_rollout_instances": 2,
    "psrl.weights.route": "nixl",  # as between hosts, though all nodes are this one
    "trainer.logger": "[console,wandb]",
    "hydra.launcher.cpus_per_task": 2,
}


def test_a_sweep_of_four(mini_slurm: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Four members, at most two at a time; trainers on the train partition's node, instances on the others; weights over
    NIXL; the dry run prints what is submitted; a report with the speed-ups."""
    overrides = SWEEP | {"model": tiny_model, "hydra.launcher.max_parallel_jobs": 2}
    planned = launch(mini_slurm, tmp_path / "sweep", overrides | {"hydra.launcher.dry_run": True})
    assert planned.members == [] and not (tmp_path / "sweep").exists()

    launched = launch(mini_slurm, tmp_path / "sweep", overrides)
    assert len(launched.members) == 4
    assert f"python -m psrl.status --watch {tmp_path / 'sweep'}" in launched.out
    ids = [member.job_id for member in launched.members]
    texts = [(tmp_path / "sweep" / ".submitit" / i / f"{i}_submission.sh").read_text() for i in ids]
    for number, text in enumerate(texts):
        after = f"afterany:{ids[number - 2]}" if number >= 2 else None
        expected = planned_text(planned.out, number)
        if after:
            expected = expected.replace(f"afterany:<job of member {number - 2}>", after)
        assert text.strip() == expected.strip()

    for member in launched.members:
        leader, second = member.info()
        assert (leader["Partition"], second["Partition"]) == ("train", "rollout")
        nodes = [part["NumNodes"].partition("-")[0] for part in (leader, second)]  # "2-2" while it waits
        assert (leader["HetJobId"], nodes) == (member.job_id, ["1", "2"])
    for member in launched.members:
        member.completed(steps=8)
        assert member.node_of("trainer-node") <= {"n1", "n2"} and member.node_of("rollout-node") == {"n3", "n4"}
        assert read_published(member.dir.data / "weight_channel") == b"nixl"
        assert json.loads(member.dir.summary.read_text())["transport"].startswith("nixl")
    identities = [json.loads(member.dir.run.read_text())["sweep"] for member in launched.members]
    assert len({entry["id"] for entry in identities}) == 1
    wandb_ids = {(member.dir.rendezvous / "wandb_id").read_text() for member in launched.members}
    assert len(wandb_ids) == 4

    subprocess.run([sys.executable, "-m", "psrl.report", str(tmp_path / "sweep")], check=True, timeout=DEADLINE_S)
    rows = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert len(rows["members"]) == 4 and (tmp_path / "sweep" / "report" / "index.html").exists()
    status = subprocess.run(
        [sys.executable, "-m", "psrl.status", str(tmp_path / "sweep")],
        env=mini_slurm.env, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "4 members: 4 completed" in status.stdout


def test_three_members_at_once_on_one_node(mini_slurm: Any, tiny_model: Path, tmp_path: Path) -> None:
    """The degenerate job of a single node, three times on the same one, each with endpoints of its own."""
    overrides = paced(tmp_path, 1.0) | {
        "model": tiny_model,
        "seed": "1,2,3",
        "trainer.total_training_steps": 3,
        "hydra.launcher.job": "single_node",
        "hydra.launcher.trainer.partition": "all",
        "hydra.launcher.cpus_per_task": 1,
        "hydra.launcher.sbatch": "['--nodelist=n2']",
    }
    members = launch(mini_slurm, tmp_path / "sweep", overrides).members
    members[0].until(lambda: [m.state() for m in members] == ["RUNNING"] * 3, "all three run at once")
    hurry(tmp_path)
    for member in members:
        member.completed(steps=3)
        assert member.node_of("node-") == {"n2"} and len(member.info()) == 1
    endpoints = {(m.dir.rendezvous / "coordinator.000000").read_bytes() for m in members}
    assert len(endpoints) == 3


def test_a_launch_inside_an_allocation_with_hostile_variables(
    mini_slurm: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """B21: nothing of the outer job or of the site's defaults leaks into the submitted one; and B24: the output root may
    have blanks, commas and equals signs in its name."""
    hostile = {
        "SLURM_ARRAY_JOB_ID": "999", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "999", "SLURM_NTASKS": "7",
        "SLURM_CPU_BIND": "none", "SLURM_HET_SIZE": "3", "SLURM_PROCID": "5", "SBATCH_PARTITION": "nope",
        "SBATCH_ARRAY_INX": "0-3", "SRUN_CPUS_PER_TASK": "9", "SLURM_NNODES": "5", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1", "RANK": "3", "WORLD_SIZE": "64", "LOCAL_RANK": "3", "PSRL_ATTEMPT": "old",
    }  # fmt: skip
    root = tmp_path / "o ut" / "a=1,b"
    root.parent.mkdir()
    overrides = {"model": tiny_model, "trainer.total_training_steps": 3, "note": "'a,b = \"c\" [d]'"}
    member = launch(mini_slurm, root, overrides, extra_env=hostile).members[0]
    leader, second = member.info()
    assert (leader["Partition"], second["Partition"]) == ("train", "rollout")
    member.completed(steps=3)
    assert "psrl: completed" in member.job_log
    config = (member.dir.config).read_text()
    assert 'note: a,b = "c" [d]' in config or "note: 'a,b = \"c\" [d]'" in config


def planned_text(out: str, number: int) -> str:
    """The script of one member in the output of a dry run."""
    parts = out.split("\n# member ")
    text = parts[number].partition("\n")[2]
    return text


BAD: list[tuple[dict[str, object], str]] = [
    ({"hydra.launcher.trainer.partition": "gpu"}, "hydra.launcher.trainer.partition=gpu is refused"),
    ({"psrl.deployment.n_rollout_instances": 3}, "hydra.launcher.rollout.nodes=3 is refused: partition rollout has 2"),
    ({"hydra.launcher.time": "soon"}, "hydra.launcher.time=soon"),
    ({"hydra.launcher.timeout_min": "abc"}, "hydra.launcher.timeout_min=abc is refused"),
    (
        {"psrl.deployment.rollout_ngpus_per_node": 4, "psrl.deployment.n_rollout_instances": 5},
        "n_rollout_instances=5 does not divide",
    ),
    ({"psrl.staleness": "'[0,1,2]'"}, "psrl.staleness="),
    ({"note": "a=b"}, "quote the value"),
    ({"psrl.staleness": "0,1,"}, "Cannot read the override"),
    ({"hydra.launcher.no_such_key": 1}, "Unknown key hydra.launcher.no_such_key"),
    ({"psrl.no_such_key": 1}, "Unknown key psrl.no_such_key"),
    ({"data.task": "null", "data.train_files": "/nowhere/train.parquet"}, "/nowhere/train.parquet"),
    ({"psrl.staleness": "0,1", "run_dir": "/tmp/x"}, "give hydra.sweep.dir"),
    ({"gen_actor_rollout_ref.rollout.enforce_eager": True}, "rollout.enforce_eager=True has no meaning with"),
]


@pytest.mark.parametrize(("overrides", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_bad_input_is_told_before_anything_is_submitted(
    mini_slurm: Any, tiny_model: Path, tmp_path: Path, overrides: dict[str, object], said: str
) -> None:
    """Also when only the last member is wrong: none is submitted, and nothing but Hydra's own note is left."""
    done = launch(mini_slurm, tmp_path / "sweep", {"model": tiny_model} | overrides, expect=2)
    lines = [line for line in done.err.splitlines() if not line.startswith("psrl: warning")]
    assert len(lines) == 1 and said in lines[0], done.err
    assert done.members == []


def test_no_kill_and_a_missing_slurm_are_refused(mini_slurm: Any, tiny_model: Path, tmp_path: Path) -> None:
    done = launch(mini_slurm, tmp_path / "a", {"model": tiny_model}, extra_env={"SBATCH_NO_KILL": ""}, expect=2)
    assert "SBATCH_NO_KILL is set" in done.err
    nowhere = {"SLURM_CONF": str(tmp_path / "no.conf")}
    done = launch(mini_slurm, tmp_path / "b", {"model": tiny_model}, extra_env=nowhere, expect=2)
    assert "hydra/launcher=submitit_slurm cannot submit" in done.err
