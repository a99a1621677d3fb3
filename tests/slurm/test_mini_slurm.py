"""scripts/mini_slurm.py, and what the other tests here take for granted about the Slurm that it starts."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from mini_cluster import SCRIPT, MiniSlurm, mini_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

LEAVES_A_DAEMON = """\
#!/bin/bash
env -i setsid sleep 1000 &
echo $! >>pids
echo start ${SLURM_RESTART_COUNT:-0}
exec sleep 1000
"""
"""Its `sleep` has no parent, no session and no environment in common with the job once the script is gone."""

RECORDS_SIGNALS = """\
#!/bin/bash
#SBATCH --partition=train --nodes=1 --ntasks-per-node=1 --cpus-per-task=2
#SBATCH hetjob
#SBATCH --partition=preemptible --nodes=1 --ntasks-per-node=1 --cpus-per-task=2
srun --kill-on-bad-exit=1 --wait=0 --het-group=0 ./record.sh trainer : --het-group=1 ./record.sh rollout
"""
RECORD = """\
#!/bin/bash
for name in TERM USR2; do trap "echo $name >>$1" $name; done
echo start >>$1
while :; do sleep 0.1; done
"""

HET = """\
#!/bin/bash
#SBATCH --partition=train --nodes=2 --ntasks-per-node=1 --cpus-per-task=2
#SBATCH hetjob
#SBATCH --partition=rollout --nodes=1 --ntasks-per-node=1 --cpus-per-task=3 --gpus-per-node=2
srun --kill-on-bad-exit=1 --wait=0 --het-group=0 --cpus-per-task=2 --cpu-bind=none ./show.sh 0 : \
     --het-group=1 --cpus-per-task=3 --gpus-per-node=2 --cpu-bind=none ./show.sh 1
"""
SHOW = """\
#!/bin/bash
echo "$1 $SLURM_PROCID $SLURMD_NODENAME $SLURM_NTASKS_HET_GROUP_0 $SLURM_NTASKS_HET_GROUP_1" \
     "$SLURM_JOB_NODELIST_HET_GROUP_0 $SLURM_JOB_NODELIST_HET_GROUP_1 $SLURM_JOB_ID ${CUDA_VISIBLE_DEVICES:-none}"
"""


@pytest.fixture
def slurm(mini_slurm: MiniSlurm) -> Iterator[MiniSlurm]:
    """The session's cluster, without jobs before and after the test."""
    mini_slurm.end_jobs()
    yield mini_slurm
    mini_slurm.end_jobs()


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.1)


def program(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_of(directory: Path) -> list[str]:
    """The living processes that have a file of a cluster in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
            words = [*argv, *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if any(f"{directory}/" in word for word in words):
            found.append(f"{process.pid} {' '.join(argv)}")
    return found


def commands_of(directory: Path) -> set[str]:
    """What scripts/mini_slurm.py does about a cluster at the moment, and "guard" for who waits to do something."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            argv = process.cmdline()
            if str(directory) in argv and str(SCRIPT) in argv:
                found.add(argv[2] if argv[1] == str(SCRIPT) else "guard")
    return found


# ---- up, down, status ------------------------------------------------------------------------------------------------


def test_up_again_changes_nothing(slurm: MiniSlurm) -> None:
    before = {file.name: file.read_text() for file in (slurm.dir / "pids").iterdir()}
    again = slurm.script("up")
    assert again.stdout == f"export SLURM_CONF={slurm.conf}\n"
    assert {file.name: file.read_text() for file in (slurm.dir / "pids").iterdir()} == before
    other = slurm.script("up", "--nodes", "3", check=False)
    assert other.returncode == 2 and "'nodes': 4" in other.stderr and other.stdout == ""
    assert slurm.script("status").stdout.count("idle") == 5


def test_two_clusters_side_by_side_and_down_ends_one_with_its_jobs(slurm: MiniSlurm, tmp_path: Path) -> None:
    with mini_cluster(tmp_path, "--nodes", "2") as other:
        jobs = slurm.submit(LEAVES_A_DAEMON), other.submit(LEAVES_A_DAEMON)
        slurm.wait_job_state(jobs[0], "RUNNING")
        other.wait_job_state(jobs[1], "RUNNING")
        wait_until(lambda: bool(lines(tmp_path / "pids")), 60, "the job writes the pid of its daemon")
        daemon = int(lines(tmp_path / "pids")[0])
        assert is_alive(daemon)

        other.script("down")
        assert not is_alive(daemon)
        assert not processes_of(other.dir)
        assert not other.dir.exists()
        assert other.script("status", check=False).returncode == 3
        other.script("down")
        assert slurm.script("status").returncode == 0
        assert slurm.job_info(jobs[0])[0]["JobState"] == "RUNNING"


def test_down_ends_what_a_node_without_its_daemons_left_behind(tmp_path: Path) -> None:
    with mini_cluster(tmp_path, "--nodes", "2") as cluster:
        cluster.submit("#!/bin/bash\nsleep 1000 & echo $! >>pids\nexec srun sleep 1000\n", "--nodelist=n1")
        wait_until(lambda: bool(lines(tmp_path / "pids")), 60, "the job writes the pid of its child")
        cluster.kill_daemons("n1")
        wait_until(lambda: not any("-N n1" in line for line in processes_of(cluster.dir)), 60, "slurmd has ended too")
        child = int(lines(tmp_path / "pids")[0])
        assert is_alive(child)
        cluster.script("down")
        assert not is_alive(child) and not processes_of(cluster.dir)


def test_down_ends_a_cluster_whose_files_are_gone(tmp_path: Path) -> None:
    with mini_cluster(tmp_path, "--nodes", "2") as cluster:
        while cluster.dir.exists():  # its daemons still write there
            shutil.rmtree(cluster.dir, ignore_errors=True)
        assert processes_of(cluster.dir)
        cluster.script("down")
        assert not processes_of(cluster.dir)


def test_a_directory_with_other_files_is_left_alone(slurm: MiniSlurm) -> None:
    directory = slurm.outputs / "mine"
    directory.mkdir()
    (directory / "state").write_text("dear")
    refused = slurm.run(sys.executable, SCRIPT, "up", "--dir", directory, check=False)
    assert refused.returncode == 2 and "holds other files" in refused.stderr
    assert (directory / "state").read_text() == "dear"


SESSION = """
import pathlib, sys, time
import mini_cluster as cluster_for_tests
cluster_for_tests.tempfile.mkdtemp = lambda prefix, dir: (pathlib.Path(sys.argv[2]).mkdir(), sys.argv[2])[1]
with cluster_for_tests.mini_cluster(pathlib.Path(sys.argv[1]), "--nodes", "2") as cluster:
    print("up", flush=True)
    time.sleep(600)
"""
"""A test session whose cluster has its files where it is told to."""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", SESSION, tmp_path, directory_of(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as process:
        yield process
        process.kill()


def directory_of(tmp_path: Path) -> Path:
    return Path("/tmp") / f"psrl-slurm-{hashlib.sha256(bytes(tmp_path)).hexdigest()[:8]}"


def test_the_cluster_ends_with_a_killed_test_session(session: subprocess.Popen[str], tmp_path: Path) -> None:
    directory = directory_of(tmp_path)
    assert session.stdout is not None and session.stdout.readline() == "up\n"
    assert processes_of(directory)
    session.kill()
    wait_until(lambda: not directory.exists(), 180, "its guard has ended the cluster")
    assert not processes_of(directory)


def test_a_session_killed_while_its_cluster_waits_to_start_leaves_none(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory = directory_of(tmp_path)
    with Path(f"/tmp/psrl-mini-slurm-{os.getuid()}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        session = request.getfixturevalue("session")  # not before the lock is held here
        wait_until(lambda: "up" in commands_of(directory), 180, "`up` waits for the lock")
        session.kill()
        session.wait()
        time.sleep(0.5)  # whoever reacts to the kill does so now, while nobody has the lock
    wait_until(lambda: not commands_of(directory), 180, "`up` and `down` have ended")
    assert not processes_of(directory) and not directory.exists()


# ---- what Slurm does -------------------------------------------------------------------------------------------------


def test_a_het_job_is_one_step_over_both_partitions(slurm: MiniSlurm) -> None:
    program(slurm.outputs, "show.sh", SHOW)
    job = slurm.submit(HET)
    components = slurm.wait_job_state(job, "COMPLETED")
    assert [(c["Partition"], c["NodeList"], c["HetJobOffset"]) for c in components] == [
        ("train", "n[1-2]", "0"),
        ("rollout", "n3", "1"),
    ]
    shown = [line for line in slurm.output(job).splitlines() if line[0].isdigit()]
    assert sorted(shown) == [
        f"0 0 n1 2 1 n[1-2] n3 {job} none",
        f"0 1 n2 2 1 n[1-2] n3 {job} none",
        f"1 2 n3 2 1 n[1-2] n3 {job} 0,1",
    ]


def test_a_requeued_job_starts_again(slurm: MiniSlurm) -> None:
    job = slurm.submit(LEAVES_A_DAEMON)
    slurm.wait_job_state(job, "RUNNING")
    slurm.run("scontrol", "requeue", str(job))
    slurm.wait_job_state(job, "RUNNING", timeout=60, restarts=1)
    wait_until(lambda: slurm.output(job) == "start 1\n", 60, "SLURM_RESTART_COUNT=1")


def test_a_killed_node_takes_its_processes_along_and_the_job_starts_elsewhere(slurm: MiniSlurm) -> None:
    pids = slurm.outputs / "pids"
    pids.unlink(missing_ok=True)
    job = slurm.submit(LEAVES_A_DAEMON, "--nodelist=n1")
    slurm.wait_job_state(job, "RUNNING")
    wait_until(lambda: bool(lines(pids)), 60, "the job writes the pid of its daemon")
    slurm.kill_node("n1")
    assert not is_alive(int(lines(pids)[0]))
    assert slurm.script("status", check=False).returncode == 1
    slurm.wait_job_state(job, "PENDING", timeout=120)
    slurm.start_node("n1")
    assert slurm.script("status").returncode == 0
    slurm.wait_job_state(job, "RUNNING", timeout=60, restarts=1)


def test_preemption_warns_the_preempted_component_only(slurm: MiniSlurm) -> None:
    program(slurm.outputs, "record.sh", RECORD)
    trainer, rollout = slurm.outputs / "trainer", slurm.outputs / "rollout"
    job = slurm.submit(RECORDS_SIGNALS)
    wait_until(lambda: bool(lines(trainer) and lines(rollout)), 60, "both components have started")
    slurm.run("scancel", "--signal=USR2", str(job))
    wait_until(lambda: "USR2" in lines(trainer) and "USR2" in lines(rollout), 60, "scancel reaches both components")

    urgent = slurm.submit("#!/bin/bash\nsleep 1000\n", "--partition=urgent", "--nodes=2", "--exclusive")
    wait_until(lambda: "TERM" in lines(rollout), 60, "the rollout component is warned")
    time.sleep(5)  # of GraceTime=15
    assert lines(trainer) == ["start", "USR2"]
    assert [c["JobState"] for c in slurm.job_info(job)] == ["RUNNING", "RUNNING"], "it has a grace time"
    slurm.wait_job_state(urgent, "PENDING", timeout=1)
