"""A Slurm cluster of scripts/mini_slurm.py for tests: its commands, and its end with all of its jobs whatever happens."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "mini_slurm.py"
OTHER_CLUSTER = re.compile(r"(SLURM|SBATCH_|SRUN_|SALLOC_|SQUEUE_|SINFO_|SCANCEL_)")
OTHERS_S = 700.0
"""For `up` and `down`: those of other clusters come first, scripts/mini_slurm.py waits up to 600 s for them."""
FIELD = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)")
"""`Key=value` in a line of `scontrol show job -o`; a value may have spaces."""


class MiniSlurm:
    """The ordinary commands of a cluster of n1 ... n4; scripts/mini_slurm.py tells its partitions."""

    def __init__(self, directory: Path, outputs: Path) -> None:
        self.dir, self.conf = directory, directory / "slurm.conf"
        self.outputs = outputs
        """Where jobs start, and write slurm-<id>.out unless told otherwise."""
        clean = {key: value for key, value in os.environ.items() if not OTHER_CLUSTER.match(key)}
        self.env = clean | {"SLURM_CONF": str(self.conf)}

    def run(
        self, *argv: str | Path, timeout: float = 60, check: bool = True, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command in the cluster's environment; `text` is its input."""
        process = subprocess.run(
            argv, env=self.env, cwd=self.outputs, input=text or "", capture_output=True, text=True, timeout=timeout
        )
        assert process.returncode == 0 or not check, f"{argv} ended with {process.returncode}: {process.stderr}"
        return process

    def script(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """scripts/mini_slurm.py on this cluster."""
        return self.run(sys.executable, SCRIPT, *argv, "--dir", self.dir, timeout=OTHERS_S, check=check)

    def kill_node(self, name: str) -> None:
        """SIGKILL to its slurmd and to everything that the node started."""
        self.script("kill-node", name)

    def kill_daemons(self, name: str) -> None:
        """SIGKILL to its slurmd and to the stepds of its job steps; what they started stays."""
        keeper = psutil.Process(int((self.dir / "pids" / name).read_text().split()[0]))
        daemons = [keeper]
        for child in keeper.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # slurmd forks twice for a stepd
                if child.name() == "slurmstepd":
                    daemons.append(child)
        assert len(daemons) > 1
        for process in daemons:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def start_node(self, name: str) -> None:
        self.script("start-node", name)

    # ---- jobs ------------------------------------------------------------------------------------------------

    def submit(self, job: str | Path, *args: str) -> int:
        """The id of the job (a het job's leader) that the batch script, as text or file, makes with sbatch's `args`."""
        if isinstance(job, Path):
            process = self.run("sbatch", "--parsable", *args, job)
        else:
            process = self.run("sbatch", "--parsable", *args, text=job)
        return int(process.stdout.partition(";")[0])

    def job_info(self, job_id: int) -> list[dict[str, str]]:
        """`scontrol show job`: one dictionary a component, in their order; one only if it is no het job."""
        lines = self.run("scontrol", "show", "job", "--oneliner", str(job_id)).stdout.splitlines()
        components = [dict(FIELD.findall(line)) for line in lines]
        return sorted(components, key=lambda component: int(component.get("HetJobOffset", 0)))

    def wait_job_state(
        self, job_id: int, states: str | Collection[str], timeout: float = 60, restarts: int = 0
    ) -> list[dict[str, str]]:
        """Until every component is in one of the states (RUNNING, COMPLETED, ...) and has been requeued that often."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while True:
            components = self.job_info(job_id)
            if all(c["JobState"] in wanted and int(c["Restarts"]) >= restarts for c in components):
                return components
            seen = [{key: c[key] for key in ("JobId", "JobState", "Reason", "Restarts")} for c in components]
            assert time.monotonic() < deadline, f"not {wanted} with {restarts} restarts after {timeout} s: {seen}"
            time.sleep(0.2)

    def output(self, job_id: int) -> str:
        """What the batch script has printed so far."""
        path = Path(self.job_info(job_id)[0]["StdOut"])
        return path.read_text() if path.exists() else ""

    def end_jobs(self, timeout: float = 60) -> None:
        """Nothing waits, runs or completes any more. Processes are killed, so that nobody uses up KillWait."""
        self.run("scancel", "--me")
        deadline = time.monotonic() + timeout
        while jobs := self.run("squeue", "--me", "--noheader").stdout:
            for process in self.job_processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            assert time.monotonic() < deadline, f"still there {timeout} s after scancel:\n{jobs}"
            time.sleep(0.2)

    def job_processes(self) -> list[psutil.Process]:
        """Batch scripts, tasks and all that they started, on every node."""
        found = []
        for pid_file in (self.dir / "pids").glob("n[0-9]"):
            with suppress(psutil.NoSuchProcess):
                node = psutil.Process(int(pid_file.read_text().split()[0]))
                found += [p for p in node.children(recursive=True) if p.name() not in ("slurmd", "slurmstepd")]
        return found


GUARD = """
trap '' PIPE
python=$1 script=$2 dir=$3; shift 3
"$python" "$script" up --dir "$dir" "$@" >/dev/null; echo $?
read -r _
"$python" "$script" down --dir "$dir" >/dev/null; echo $?
"""
"""Whenever the test session is killed, `down` comes after `up`. Nobody may listen any more: SIGPIPE would end it before."""


@contextmanager
def mini_cluster(outputs: Path, *up: str) -> Iterator[MiniSlurm]:
    """A cluster in a directory of its own. A guard in a process group of its own starts and ends it, also when this process is killed."""
    directory = Path(tempfile.mkdtemp(prefix="psrl-slurm-", dir="/tmp"))
    with tempfile.TemporaryFile("w+") as told:
        guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", sys.executable, str(SCRIPT), str(directory), *up],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=told,
            process_group=0,  # no session: tests of psrl.supervisor take children in other sessions for orphans, and kill them
        )
        assert guard.stdout is not None
        try:
            if started := guard.stdout.readline() == b"0\n":  # `up` has its deadlines
                yield MiniSlurm(directory, outputs)
        finally:
            ended, _ = guard.communicate(b"\n", timeout=OTHERS_S)
            told.seek(0)
            # Its own word: the exit code is 0 as well where somebody else has waited for it.
            assert ended == b"0\n", f"the cluster in {directory} did not end: {told.read()}"
            shutil.rmtree(directory, ignore_errors=True)
        if not started:
            pytest.fail(told.read(), pytrace=False)
