"""The batch scripts under slurm/ work as they stand, with a few overrides as arguments."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from runs import DEADLINE_S
from sweeps import ON_SLURM, ROOT, Member, sbatch

from psrl.outcome import read_outcome
from psrl.rundir.layout import RunDir
from psrl.slurm.job_text import END, READ_VERDICT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

TEMPLATES = sorted((ROOT / "slurm").glob("*.sbatch"))
SIZES = ("psrl.deployment.rollout_ngpus_per_node", "psrl.deployment.n_rollout_instances", "preset")


def overrides(model: Path) -> list[str]:
    """Sizes are left to the job."""
    settings = {k: v for k, v in ON_SLURM.items() if k not in SIZES} | {"trainer.total_training_steps": 3}
    return [f"model={model}", *(f"{key}={value}" for key, value in settings.items())]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_a_script_that_ends_with_the_verdict(template: Path) -> None:
    text = template.read_text()
    assert subprocess.run(["bash", "-n", str(template)]).returncode == 0
    assert text.endswith(END) == (READ_VERDICT in text) == ("join" not in template.stem)
    assert "pkill" not in text and "--no-kill" not in text
    for wanted in ("--signal=USR2@", "--requeue", "--open-mode=append", "--kill-on-bad-exit=1 --wait=0"):
        assert wanted in text, wanted


@pytest.mark.parametrize(("name", "nodes"), [("het_fsdp2_vllm", None), ("single_node", 1), ("single_node", 2)])
def test_a_template_trains_and_the_same_directory_is_completed(
    mini_slurm: Any, tiny_model: Path, tmp_path: Path, name: str, nodes: int | None
) -> None:
    run_dir = RunDir(tmp_path / "run")
    script = ROOT / "slurm" / f"{name}.sbatch"
    size = (f"--nodes={nodes}",) if nodes else ()
    job = sbatch(mini_slurm, script, *overrides(tiny_model), options=size, run_dir=run_dir.path)
    mini_slurm.wait_job_state(job, ["COMPLETED", "FAILED"], DEADLINE_S)
    outcome = read_outcome(run_dir)
    member = Member(mini_slurm, run_dir)
    assert outcome is not None and outcome.status == "completed" and member.steps() == [1, 2, 3]
    assert mini_slurm.job_info(job)[0]["JobState"] == "COMPLETED"

    again = sbatch(mini_slurm, script, *overrides(tiny_model), options=size, run_dir=run_dir.path)
    mini_slurm.wait_job_state(again, ["COMPLETED", "FAILED"], DEADLINE_S)
    assert mini_slurm.job_info(again)[0]["JobState"] == "COMPLETED"
    assert member.steps() == [1, 2, 3] and read_outcome(run_dir) == outcome


def test_a_wrong_value_in_a_template_ends_the_job_with_one_sentence(
    mini_slurm: Any, tiny_model: Path, tmp_path: Path
) -> None:
    script, log = ROOT / "slurm" / "single_node.sbatch", tmp_path / "job.out"
    arguments = [*overrides(tiny_model), "psrl.stalenes=2"]
    job = sbatch(mini_slurm, script, *arguments, options=(f"--output={log}",), run_dir=tmp_path / "run")
    mini_slurm.wait_job_state(job, ["COMPLETED", "FAILED"], DEADLINE_S)
    assert mini_slurm.job_info(job)[0]["JobState"] == "FAILED"
    assert "psrl: Unknown key psrl.stalenes: did you mean psrl.staleness" in log.read_text()
    assert not (tmp_path / "run").exists()
