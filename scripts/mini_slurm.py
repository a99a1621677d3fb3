#!/usr/bin/env python3
"""A real Slurm on this host: one slurmctld, N slurmd and a munged of its own, for tests and for trying things out.

    eval "$(scripts/mini_slurm.py up)"      # starts it (or finds it running) and sets SLURM_CONF
    sbatch ... ; squeue ; scancel ...       # the ordinary commands
    scripts/mini_slurm.py down              # ends its jobs and daemons, removes its files

Needs Linux and Debian's packages slurm-wlm and munge, which `up` installs if it may. Every daemon runs as the user who
calls this, who is also the only one who can use the cluster; everything lies in DIR (0700). Partitions: `train` (first half of
the nodes), `rollout` (second half), `all`; `preemptible` and `urgent` (the rollout nodes; jobs of `urgent` requeue those of
`preemptible` after TERM and 15 s). Only the standard library, Python >= 3.9.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sinfo", "srun")
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
UP_DEADLINE_S = 60.0
END_DEADLINE_S = 20.0
LONGEST_DIR = 70
"""Characters: slurmd makes Unix sockets DIR/spool/n1/n1_12345.4294967291, and a socket's name has 107 bytes at most."""
DIR_CHARACTERS = re.compile(r"[A-Za-z0-9/._+-]*")
DIRECTORIES = ("log", "pids", "state", "spool")
HEALTHY = {"idle", "mix", "alloc", "comp", "plnd"}
"""sinfo's compact states of a node that answers; a state with a mark behind it (`idle*`) does not."""
PR_SET_CHILD_SUBREAPER = 36
KEEP_NODE = "keep-node"

CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=15
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/pids/slurmctld.self
SlurmdPidFile={dir}/pids/%n.self
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,bf_hetjob_immediate
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ReturnToService=2
SlurmdTimeout=10
KillWait=20
InactiveLimit=0
MinJobAge=3600
NodeName=DEFAULT CPUs={cpus} RealMemory=1000000 State=UNKNOWN
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}]
PartitionName=DEFAULT MaxTime=INFINITE DefaultTime=01:00:00 State=UP PreemptMode=OFF
PartitionName=train Nodes={train}
PartitionName=rollout Nodes={rollout}
PartitionName=all Nodes=ALL Default=YES
PartitionName=preemptible Nodes={rollout} PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=urgent Nodes={rollout} PriorityTier=10
"""


class MiniSlurmError(Exception):
    """One sentence for the user."""


def say(text: str) -> None:
    print(f"mini_slurm: {text}", file=sys.stderr, flush=True)


# ---- processes ---------------------------------------------------------------------------------------------------


def process_stat(pid: int) -> tuple[str, int, int] | None:
    """(state letter, parent's pid, start time in ticks since boot), None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1]), int(fields[19])


def descendants(root: int) -> list[int]:
    """The living processes below root, parents before their children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        stat = process_stat(int(name)) if name.isdigit() else None
        if stat and stat[0] != "Z":
            children.setdefault(stat[1], []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def keep_node(command: list[str]) -> None:
    """Runs slurmd as a subreaper: whatever the node started, daemons too, stays below this process and ends after slurmd."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    slurmd = subprocess.Popen(command)
    try:
        while os.wait()[0] != slurmd.pid:
            pass
        while True:
            for pid in descendants(os.getpid()):
                kill(pid)
            os.wait()
    except ChildProcessError:
        return


class Daemon:
    """A process of the cluster that outlives this program; its pid file says which one it is."""

    def __init__(self, cluster: Path, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.pid_file = cluster / "pids" / name
        self.output = cluster / "log" / f"{name}.out"

    def start(self, command: list[str]) -> None:
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.cluster,
                env={**os.environ, "PATH": PATH},
                start_new_session=True,
            )
        stat = process_stat(process.pid)
        assert stat is not None, "a child stays until it is waited for"
        self.pid_file.write_text(f"{process.pid} {stat[2]}")

    def pid(self) -> int | None:
        """None if it does not run. A process with the same number that is not ours does not count."""
        try:
            pid, start_time = map(int, self.pid_file.read_text().split())
            ours = os.fsencode(self.cluster) in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None
        stat = process_stat(pid)
        return pid if ours and stat and stat[0] != "Z" and stat[2] == start_time else None

    def end(self) -> None:
        """SIGKILL to everything below it, then to itself."""
        deadline = time.monotonic() + END_DEADLINE_S
        while (pid := self.pid()) is not None:
            if time.monotonic() > deadline:
                raise MiniSlurmError(f"{self.name} (pid {pid}) has not ended within {END_DEADLINE_S:g} s")
            for process in descendants(pid) or [pid]:
                kill(process)
            time.sleep(0.02)
        self.pid_file.unlink(missing_ok=True)

    def last_words(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-5:])


# ---- what a cluster needs ------------------------------------------------------------------------------------------


def install_missing() -> None:
    if all(shutil.which(program, path=PATH) for program in PROGRAMS):
        return
    way_out = f"Slurm is not installed here: install Debian's packages (apt-get install {' '.join(PACKAGES)}), then run this again"
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if not all(shutil.which(program, path=PATH) for program in (*root[:1], "apt-get")):
        raise MiniSlurmError(way_out)
    say(f"installing {' '.join(PACKAGES)} ...")
    for action in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        command = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", *action]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
            raise MiniSlurmError(f"{' '.join(command)} failed. {way_out}")


def program(name: str) -> str:
    path = shutil.which(name, path=PATH)
    if path is None:
        raise MiniSlurmError(f"{name} is gone: apt-get install {' '.join(PACKAGES)}")
    return path


def free_ports(count: int) -> int:
    """First of `count` neighbouring free ports, outside of the range from which the kernel hands out ports by itself."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        first = random.randrange(10000, (low if low > 20000 else 65536) - count)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise MiniSlurmError(f"no {count} neighbouring free ports on this host")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Of this user's `up` and `down` on this host: a port that was chosen is bound before the next one chooses."""
    path = Path("/tmp") / f"psrl-mini-slurm-{os.getuid()}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---- the cluster -------------------------------------------------------------------------------------------------


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.conf = directory / "slurm.conf"
        self.settings_file = directory / "settings.json"
        self.munged = Daemon(directory, "munged")
        self.slurmctld = Daemon(directory, "slurmctld")

    @property
    def settings(self) -> dict[str, int] | None:
        """{"nodes", "cpus_per_node"} as given to `up`; None if there is no cluster in this directory."""
        return json.loads(self.settings_file.read_text()) if self.settings_file.exists() else None

    @property
    def nodes(self) -> dict[str, Daemon]:
        count = (self.settings or {"nodes": 0})["nodes"]
        return {name: Daemon(self.dir, name) for name in (f"n{i}" for i in range(1, count + 1))}

    @property
    def daemons(self) -> list[Daemon]:
        return [*self.nodes.values(), self.slurmctld, self.munged]

    def node(self, name: str) -> Daemon:
        if name not in self.nodes:
            raise MiniSlurmError(f"no node {name!r} in {self.dir}: it has {', '.join(self.nodes) or 'no cluster'}")
        return self.nodes[name]

    def sinfo(self, *options: str) -> str:
        """Raises subprocess.SubprocessError if the controller does not answer."""
        command = [program("sinfo"), *options]
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=10
        ).stdout

    def healthy_nodes(self) -> set[str]:
        """Nodes whose slurmd runs and answers, in partitions that are up."""
        if self.munged.pid() is None or self.slurmctld.pid() is None:
            return set()
        try:
            rows = [line.split() for line in self.sinfo("--noheader", "--Node", "--format=%N %t %a").splitlines()]
        except subprocess.SubprocessError:
            return set()
        ill = {name for name, state, partition in rows if state not in HEALTHY or partition != "up"}
        return {row[0] for row in rows if self.nodes[row[0]].pid()} - ill

    def is_healthy(self) -> bool:
        return self.healthy_nodes() == set(self.nodes)

    def is_down(self) -> bool:
        return not any(daemon.pid() for daemon in self.daemons)

    # ---- up --------------------------------------------------------------------------------------------------

    def up(self, settings: dict[str, int]) -> None:
        """From nothing, or what is missing of a running cluster with these settings. A failed start leaves the logs only."""
        from_nothing = self.is_down()
        if from_nothing:
            self.lay_out(settings)
        elif self.settings != settings:
            raise MiniSlurmError(f"{self.dir} runs a cluster of {self.settings}, not {settings}: `down` first, or another --dir")
        try:
            self.start_controller()
            for name in self.nodes:
                self.start_node(name)
            self.wait_for(set(self.nodes))
        except BaseException:
            if from_nothing:
                self.end()
            raise

    def lay_out(self, settings: dict[str, int]) -> None:
        """Directories, key and slurm.conf with fresh ports. The settings come first: they mark the directory as ours."""
        self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.remove_files()
        if any(self.dir.iterdir()):
            raise MiniSlurmError(f"--dir {self.dir} holds other files: choose an empty directory or one that is not there yet")
        self.settings_file.write_text(json.dumps(settings))
        for name in DIRECTORIES:
            (self.dir / name).mkdir()
        key = self.dir / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        nodes = settings["nodes"]
        port = free_ports(nodes + 1)
        text = CONF.format(
            dir=self.dir,
            host=socket.gethostname().partition(".")[0],
            user=pwd.getpwuid(os.getuid()).pw_name,
            cpus=settings["cpus_per_node"],
            nodes=nodes,
            controller_port=port,
            first_port=port + 1,
            last_port=port + nodes,
            train=f"n[1-{nodes // 2}]",
            rollout=f"n[{nodes // 2 + 1}-{nodes}]",
        )
        self.conf.write_text(text)

    def start_controller(self) -> None:
        if self.munged.pid() is None:
            files = {"socket": "munge.socket", "key-file": "munge.key", "seed-file": "munge.seed"}
            files |= {"pid-file": "pids/munged.pid", "log-file": "log/munged.log"}
            options = [f"--{option}={self.dir / file}" for option, file in files.items()]
            # --force: munged takes a socket that only this user can reach for a mistake.
            self.munged.start([program("munged"), "--foreground", "--force", "--origin=127.0.0.1", *options])
        if self.slurmctld.pid() is None:
            self.slurmctld.start([program("slurmctld"), "-D", "-f", str(self.conf)])

    def start_node(self, name: str) -> None:
        if self.node(name).pid() is None:
            slurmd = [program("slurmd"), "-D", "-N", name, "-f", str(self.conf)]
            self.node(name).start([sys.executable, "-S", __file__, KEEP_NODE, *slurmd])

    def wait_for(self, nodes: set[str]) -> None:
        deadline = time.monotonic() + UP_DEADLINE_S
        while not nodes <= self.healthy_nodes():
            for daemon in (*(self.nodes[name] for name in nodes), self.slurmctld, self.munged):
                if daemon.pid() is None:
                    raise MiniSlurmError(f"{daemon.name} has ended, its last words are:\n{daemon.last_words()}")
            if time.monotonic() > deadline:
                raise MiniSlurmError(f"not every node is idle after {UP_DEADLINE_S:g} s: see {self.dir / 'log'}")
            time.sleep(0.1)

    # ---- down ------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Nodes and jobs first, the controller last."""
        for daemon in self.daemons:
            daemon.end()

    def remove_files(self) -> None:
        """Only what `up` made; nothing in a directory that is not ours."""
        if self.settings is None:
            return
        for name in DIRECTORIES:
            shutil.rmtree(self.dir / name, ignore_errors=True)
        for file in (*self.dir.glob("munge.*"), self.conf, self.settings_file):
            file.unlink(missing_ok=True)


# ---- commands ----------------------------------------------------------------------------------------------------


def up(cluster: Cluster, nodes: int, cpus_per_node: int) -> int:
    if nodes < 2 or cpus_per_node < 1:
        raise MiniSlurmError("--nodes must be 2 or more (each half is a partition), --cpus-per-node 1 or more")
    with one_at_a_time():
        install_missing()
        cluster.up({"nodes": nodes, "cpus_per_node": cpus_per_node})
    say(f"{nodes} nodes in {cluster.dir}")
    print(f"export SLURM_CONF={cluster.conf}")
    return 0


def down(cluster: Cluster) -> int:
    with one_at_a_time():
        if cluster.settings is None:
            say(f"no cluster in {cluster.dir}")
            return 0
        cluster.end()
        cluster.remove_files()
        if any(cluster.dir.iterdir()):
            say(f"{cluster.dir} stays: it holds other files")
        else:
            cluster.dir.rmdir()
    return 0


def status(cluster: Cluster) -> int:
    if cluster.is_down():
        say(f"no cluster runs in {cluster.dir}")
        return 3
    for daemon in cluster.daemons:
        if daemon.pid() is None:
            say(f"{daemon.name} does not run")
    if cluster.slurmctld.pid():
        print(cluster.sinfo("--format=%.12P %.6a %.6D %.6t %N"), end="")
    return 0 if cluster.is_healthy() else 1


def kill_node(cluster: Cluster, name: str) -> int:
    cluster.node(name).end()
    return 0


def start_node(cluster: Cluster, name: str) -> int:
    cluster.start_node(name)
    cluster.wait_for({name})
    return 0


def default_directory() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"psrl-mini-slurm-{os.getuid()}"


def checked_directory(text: str) -> Path:
    """Absolute. Raises MiniSlurmError unless slurm.conf can name it and it is, or can become, this user's own."""
    path = Path(text).absolute()
    if not DIR_CHARACTERS.fullmatch(str(path)) or len(str(path)) > LONGEST_DIR:
        raise MiniSlurmError(f"--dir {path}: {LONGEST_DIR} characters at most, letters, digits and /._+- only")
    if path.is_symlink() or (path.exists() and not (path.is_dir() and path.stat().st_uid == os.getuid())):
        raise MiniSlurmError(f"--dir {path} is no directory of this user: choose another")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        up: "start it (or what is missing of it) and print `export SLURM_CONF=...`",
        down: "end its jobs and daemons, remove its files",
        status: "print partitions and nodes; exit code 0: all well, 1: something is missing, 3: it does not run",
        kill_node: "SIGKILL the slurmd, slurmstepd and job processes of a node",
        start_node: "start a killed node again",
    }
    for command, text in helps.items():
        sub = commands.add_parser(command.__name__.replace("_", "-"), help=text, description=text)
        sub.set_defaults(run=command)
        sub.add_argument("--dir", default=default_directory(), help="its files (default: %(default)s)")
        if command is up:
            sub.add_argument("--nodes", type=int, default=4, help="number of slurmd (default: %(default)s)")
            sub.add_argument("--cpus-per-node", type=int, default=4, help="that a node pretends to have (default: %(default)s)")
        if command in (kill_node, start_node):
            sub.add_argument("name", help="n1, n2, ...")
    arguments = vars(parser.parse_args())
    arguments.pop("command")
    run, directory = arguments.pop("run"), arguments.pop("dir")
    try:
        return run(Cluster(checked_directory(directory)), **arguments)
    except MiniSlurmError as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    if sys.argv[1:2] == [KEEP_NODE]:
        keep_node(sys.argv[2:])
    else:
        sys.exit(main())
