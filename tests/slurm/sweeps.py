"""Sweeps on the real mini Slurm: launched as a user does, watched through squeue and the run directories."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runs import DEADLINE_S, SMALL

import psrl
from psrl.audit import AuditReport, audit
from psrl.coordinator.ledger import replay
from psrl.coordinator.records import AnyRecord
from psrl.outcome import read_outcome
from psrl.role import load_config
from psrl.rundir.layout import RunDir
from psrl.telemetry.metrics import read_metrics

T = TypeVar("T")

ROOT = Path(psrl.__file__).parent.parent
ON_SLURM: dict[str, object] = SMALL | {
    "psrl.net.interface": "lo",
    "psrl.deployment.rollout_ngpus_per_node": 1,
    "psrl.deployment.n_rollout_instances": 1,
    "psrl.fault_tolerance.max_restarts": 2,
    "trainer.total_training_steps": 8,
}
PARTITIONS: dict[str, object] = {
    "hydra.launcher.trainer.partition": "train",
    "hydra.launcher.rollout.partition": "rollout",
    "hydra.launcher.timeout_min": 20,
}
PACED = """
import pathlib, time

def reward(data_source, solution_str, ground_truth, extra_info):
    if not pathlib.Path(__file__).with_name("hurry").exists():
        time.sleep({seconds})
    return float(len(solution_str) % 2)
"""


def paced(directory: Path, seconds: float) -> dict[str, object]:
    """A reward that takes its time until `hurry`, so that a run of few steps is there long enough to be hurt."""
    (directory / "pace.py").write_text(PACED.format(seconds=seconds))
    return {"reward.function": "pace:reward"}


def hurry(directory: Path) -> None:
    """The rest of a `paced` run takes no longer than it must."""
    (directory / "hurry").touch()


@dataclass(frozen=True)
class Member:
    """One run of a sweep and its job."""

    cluster: Any
    """The fixture `mini_slurm`."""
    dir: RunDir

    @property
    def job_id(self) -> str:
        return json.loads((self.dir.path / "jobs.jsonl").read_text().splitlines()[-1])["job_id"]

    def state(self) -> str:
        """Of the leader; Slurm forgets an ended job after a while."""
        return self.info()[0]["JobState"]

    def info(self) -> list[dict[str, str]]:
        """All components, the leader first."""
        return self.cluster.job_info(self.job_id)

    @property
    def restarts(self) -> int:
        return int(self.info()[0]["Restarts"])

    def steps(self) -> list[int]:
        """Steps of the surviving history."""
        return [row["training/global_step"] for row in read_metrics(self.dir.metrics)]

    def until(self, condition: Callable[[], T | None], what: str, timeout_s: float = DEADLINE_S) -> T:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{self.story()}"
            time.sleep(0.2)
        return value

    def at_step(self, step: int) -> None:
        self.until(lambda: self.steps()[-1:] >= [step], f"step {step}")

    def ended(self, timeout_s: float = DEADLINE_S) -> str:
        """The state in which the job ended."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        return self.until(lambda: state if (state := self.state()) in states else None, "the job's end", timeout_s)

    def completed(self, steps: int, timeout_s: float = DEADLINE_S) -> AuditReport:
        """The run has ended well, each step is there once and the ledger has no finding."""
        assert self.ended(timeout_s) == "COMPLETED", self.story()
        outcome = read_outcome(self.dir)
        assert outcome is not None and outcome.status == "completed", self.story()
        assert self.steps() == list(range(1, steps + 1)), self.story()
        return self.audit()

    def records(self) -> list[AnyRecord]:
        return list(replay(self.dir.ledger)) if self.dir.ledger.is_dir() else []

    def audit(self) -> AuditReport:
        config = load_config(self.dir)
        report = audit(
            self.records(), buffer_entries=config.psrl.staleness_buffer_entries, staleness=config.psrl.staleness
        )
        assert report.findings == [], report.lines()
        return report

    @property
    def job_log(self) -> str:
        path = self.dir.logs / f"slurm-{self.job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def node_of(self, role: str) -> set[str]:
        """Nodes on which supervisors whose name begins with `role` have run."""
        logs = self.dir.logs.glob(f"{role}*.log")
        return {found[1] for log in logs if (found := re.search(r"of job \d+ on (\S+)", log.read_text()))}

    def story(self) -> str:
        logs = sorted(self.dir.logs.glob("*.log")) if self.dir.logs.is_dir() else []
        parts = [f"--- job\n{self.job_log[-4000:]}", *(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)]
        return "\n".join(parts)


@dataclass
class Launched:
    """What one `python -m psrl.launch -m hydra/launcher=submitit_slurm` did."""

    code: int
    out: str
    err: str
    members: list[Member]


def launch(
    cluster: Any,
    sweep_dir: Path,
    overrides: Mapping[str, object],
    *,
    extra_env: Mapping[str, str] | None = None,
    expect: int = 0,
) -> Launched:
    """Launch a sweep below `sweep_dir`. Modules in its parent can be imported by the run's rewards."""
    settings = ON_SLURM | PARTITIONS | {"hydra.sweep.dir": f"'{sweep_dir}'"} | dict(overrides)
    argv = [sys.executable, "-m", "psrl.launch", "-m", "hydra/launcher=submitit_slurm"]
    argv += [f"{key}={value}" for key, value in settings.items()]
    env = cluster.env | {"PYTHONPATH": f"{ROOT}:{sweep_dir.parent}"} | dict(extra_env or {})
    done = subprocess.run(argv, env=env, cwd=sweep_dir.parent, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == expect, done.stdout + done.stderr
    numbers = sorted(int(path.name) for path in sweep_dir.glob("[0-9]*")) if sweep_dir.exists() else []
    members = [Member(cluster, RunDir(sweep_dir / str(number))) for number in numbers]
    return Launched(done.returncode, done.stdout, done.stderr, members)


def launch_one(cluster: Any, sweep_dir: Path, overrides: Mapping[str, object]) -> Member:
    return launch(cluster, sweep_dir, overrides).members[0]


def sbatch(
    cluster: Any, script: Path, *arguments: str, options: tuple[str, ...] = (), run_dir: Path | None = None
) -> str:
    """Submit a template as a user does; returns the job's id."""
    export = ["ALL", f"PSRL_PYTHON={sys.executable}", *([f"RUN_DIR={run_dir}"] if run_dir is not None else [])]
    command = ["sbatch", "--parsable", *options, f"--export={','.join(export)}", script, *arguments]
    return cluster.run(*command).stdout.strip()
