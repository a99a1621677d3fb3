"""Processes that outlive the program that starts them, and are found again by their pid files."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

END_DEADLINE_S = 20.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
"""Debian keeps daemons in sbin, which is not on every user's path."""
KEEPER = (sys.executable, "-S", __file__)
"""Before a slurmd's command line: this file as a program, see keep_node."""
OPTIONS = {"munged": "--socket={}/munge.socket", "slurmctld": "{}/slurm.conf", "slurmd": "{}/slurm.conf"}
"""By which argument a daemon is known as one of the cluster in a directory."""


class MiniSlurmError(Exception):
    """One sentence for the user."""


def process_stat(pid: int) -> tuple[str, int, int] | None:
    """(state letter, parent's pid, start time in ticks since boot); None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1]), int(fields[19])


def descendants(root: int) -> list[int]:
    """The living processes below root, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        stat = process_stat(int(entry.name)) if entry.name.isdigit() else None
        if stat and stat[0] != "Z":
            children.setdefault(stat[1], []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def kill_until_none(living: Callable[[], list[int]], what: str) -> None:
    deadline = time.monotonic() + END_DEADLINE_S
    while pids := living():
        if time.monotonic() > deadline:
            raise MiniSlurmError(f"{what} (pids {pids}) has not ended {END_DEADLINE_S:g} s after SIGKILL")
        kill(pids)
        time.sleep(0.02)


def keep_node(slurmd_command: list[str]) -> None:
    """Runs a slurmd and ends with it. What the node starts, daemons too, stays below this process (a subreaper), and ends last."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = os.getpid()

    def end_with_keeper() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # it was killed before it could be asked for
            os._exit(1)

    slurmd = subprocess.Popen(slurmd_command, preexec_fn=end_with_keeper)
    while os.wait()[0] != slurmd.pid:
        pass
    try:
        while True:
            kill(descendants(os.getpid()))
            os.wait()
    except ChildProcessError:
        return


def daemons_of(directory: Path, program: str) -> list[int]:
    """The living daemons of a cluster, keepers with their slurmd, by their command lines: pid files may be gone with the
    directory, or never have been written."""
    option, found = OPTIONS[program].format(directory), []
    for process in Path("/proc").iterdir():
        try:
            argv = (process / "cmdline").read_text().split("\0") if process.name.isdigit() else []
        except (OSError, UnicodeDecodeError):
            continue
        if option in argv and program in (Path(word).name for word in argv):
            found.append(int(process.name))
    return found


def end_daemons(directory: Path, program: str) -> None:
    """SIGKILL, each from the top down: nobody lives to report that a child was killed."""
    kill_until_none(
        lambda: [pid for daemon in daemons_of(directory, program) for pid in descendants(daemon) or [daemon]], program
    )


def left_behind(directory: Path) -> list[int]:
    """Of a node whose keeper was killed: each slurmstepd, known by its log, and what jobs started, by its environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            is_stepd = (process / "comm").read_text() == "slurmstepd\n"
            files = {file.readlink().parent for file in (process / "fd").iterdir()} if is_stepd else set()
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_here = os.fsencode(f"SLURM_CONF={directory}/slurm.conf") in variables
        is_job = is_here and any(variable.startswith(b"SLURMD_NODENAME=") for variable in variables)
        if process.name.isdigit() and (is_job or directory / "log" in files):
            found.append(int(process.name))
    return found


def clean_environment() -> dict[str, str]:
    """Nothing of another cluster, or of a job that this runs in."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH_", "SINFO_"))}
    return inherited | {"PATH": PATH}


class Daemon:
    """A process of a cluster that outlives this program; its pid file tells which one it is."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.pid_file = directory / "pids" / name
        self.output = directory / "log" / f"{name}.out"

    def start(self, command: list[str]) -> None:
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                env=clean_environment(),
                start_new_session=True,
            )
        stat = process_stat(process.pid)
        assert stat is not None, "a child stays until its parent has waited for it"
        self.pid_file.write_text(f"{process.pid} {stat[2]}")

    def pid(self) -> int | None:
        """None if it does not run; another process that has its number by now does not count."""
        try:
            pid, start_time = map(int, self.pid_file.read_text().split())
            is_ours = os.fsencode(self.directory) in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None
        stat = process_stat(pid)
        return pid if is_ours and stat and stat[0] != "Z" and stat[2] == start_time else None

    def end(self) -> None:
        """SIGKILL, from the top down: nobody lives to report that a child was killed."""
        kill_until_none(lambda: descendants(pid) or [pid] if (pid := self.pid()) else [], self.name)


if __name__ == "__main__":
    keep_node(sys.argv[1:])
