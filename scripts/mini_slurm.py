#!/usr/bin/env python3
"""A real Slurm on this host: slurmctld, N slurmd and a munged of their own, for tests and for trying things out.

    eval "$(scripts/mini_slurm.py up)"    # starts it, or finds it running, and sets SLURM_CONF
    sbatch ...; squeue; scancel ...       # the ordinary commands
    scripts/mini_slurm.py down            # ends its jobs and daemons, removes its files

Needs Linux and Debian's packages slurm-wlm and munge, which `up` installs if it may. Everything runs as the user who calls this,
lies in DIR; only this user, who can read its key, can submit. Nodes pretend to have what jobs for real clusters ask for: CPUs,
memory and 8 GPUs (no device behind them). Partitions: train (the first half of the nodes), rollout (the second half), all, and
on the rollout nodes preemptible and urgent: jobs in urgent requeue those in preemptible, 15 s after a TERM.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pwd
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from mini_slurm_daemons import (
    KEEPER,
    OPTIONS,
    PATH,
    Daemon,
    MiniSlurmError,
    clean_environment,
    daemons_of,
    end_daemons,
    kill_until_none,
    left_behind,
)

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo")
WAY_OUT = f"install Debian's packages (apt-get install {' '.join(PACKAGES)}), then run this again"
LOCK_DEADLINE_S = 600.0
UP_DEADLINE_S = 180.0
LONGEST_DIR = 70
"""Characters: slurmd makes sockets named DIR/spool/n1/n1_12345.4294967291, which may have 107."""
TEMPLATE = Path(__file__).with_suffix(".conf")
DIRECTORIES = ("log", "pids", "state", "spool", "gpus")
HEALTHY = {"idle", "mix", "alloc", "comp", "plnd"}
"""States of a node that answers, as sinfo abbreviates them; `idle*` does not answer."""


def say(text: str) -> None:
    print(f"mini_slurm: {text}", file=sys.stderr, flush=True)


# ---- what a cluster needs --------------------------------------------------------------------------------------------


def is_installed() -> bool:
    return all(shutil.which(name, path=PATH) for name in PROGRAMS)


def install() -> None:
    """With apt-get, as root or through a sudo that asks nothing. Raises MiniSlurmError that says what to do by hand."""
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    for action in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        command = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", *action]
        say(f"Slurm is not installed: {' '.join(command)}")
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise MiniSlurmError(f"Slurm is not installed, and this user may not install it: {WAY_OUT}") from None
    if not is_installed():
        raise MiniSlurmError(f"no {', '.join(PROGRAMS)} in {PATH}: {WAY_OUT}")


def free_ports(count: int) -> int:
    """The first of `count` neighbouring free ports, below those that the kernel hands out by itself."""
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


def host_is_loopback() -> bool:
    try:
        return socket.gethostbyname(socket.gethostname()) == "127.0.0.1"
    except OSError:
        return False


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Among this user's `up` and `down` on this host: chosen ports are bound before others are chosen."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    path = f"/tmp/psrl-mini-slurm-{os.getuid()}.lock"
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise MiniSlurmError(f"another mini_slurm.py holds {path} for {LOCK_DEADLINE_S:g} s") from None
                time.sleep(0.05)
        yield


# ---- the cluster -----------------------------------------------------------------------------------------------------


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.conf = directory / "slurm.conf"
        self.settings_file = directory / "settings.json"
        self.settings: dict[str, int] = {}
        """What `up` was given: "nodes" and "cpus_per_node". Empty if there is no cluster in this directory."""
        if self.settings_file.exists():
            self.settings = json.loads(self.settings_file.read_text())

    @property
    def nodes(self) -> list[str]:
        return [f"n{i}" for i in range(1, self.settings.get("nodes", 0) + 1)]

    @property
    def daemons(self) -> list[str]:
        return [*self.nodes, "slurmctld", "munged"]

    def running(self) -> set[str]:
        return {name for name in self.daemons if Daemon(self.dir, name).pid()}

    def sinfo(self, *options: str) -> str:
        """Raises subprocess.SubprocessError if the controller does not answer."""
        environment = clean_environment() | {"SLURM_CONF": str(self.conf)}
        run = subprocess.run(
            ["sinfo", *options], env=environment, check=True, capture_output=True, text=True, timeout=10
        )
        return run.stdout

    def missing(self) -> set[str]:
        """Daemons that do not run, and nodes that do not answer or have a partition that is not up."""
        missing = set(self.daemons) - self.running()
        if missing & {"slurmctld", "munged"}:
            return set(self.daemons)
        try:
            rows = [line.split() for line in self.sinfo("--noheader", "--Node", "--format=%N %t %a").splitlines()]
        except subprocess.SubprocessError:
            return set(self.daemons)
        return missing | {node for node, state, partition in rows if state not in HEALTHY or partition != "up"}

    def wait_for(self, nodes: set[str]) -> None:
        """Raises MiniSlurmError if one of them or the controller has ended, or does not answer in time."""
        deadline = time.monotonic() + UP_DEADLINE_S
        while self.missing() & nodes:
            for name in sorted((nodes | {"slurmctld", "munged"}) - self.running()):
                words = Daemon(self.dir, name).output.read_text(errors="replace").splitlines()[-5:]
                raise MiniSlurmError("\n".join([f"{name} has ended; its last words:", *words]))
            if time.monotonic() > deadline:
                raise MiniSlurmError(f"not every node is idle after {UP_DEADLINE_S:g} s: see {self.dir / 'log'}")
            time.sleep(0.1)

    # ---- up ----------------------------------------------------------------------------------------------------------

    def up(self, settings: dict[str, int]) -> None:
        """A fresh cluster, or what is missing of a running one. A failed fresh start ends its daemons and leaves the logs."""
        fresh = not self.running()
        if fresh:
            self.end()
            self.lay_out(settings)
        elif self.settings != settings:
            raise MiniSlurmError(
                f"{self.dir} runs a cluster with {self.settings}, not {settings}: `down` first, or another --dir"
            )
        try:
            for name in reversed(self.daemons):
                self.start(name)
            self.wait_for(set(self.nodes))
        except BaseException:
            if fresh:
                self.end()
            raise

    def lay_out(self, settings: dict[str, int]) -> None:
        self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.settings and any(self.dir.iterdir()):
            raise MiniSlurmError(f"--dir {self.dir} holds other files: choose an empty directory or a new one")
        self.remove_files()
        self.settings_file.write_text(json.dumps(settings))
        self.settings = settings
        for name in DIRECTORIES:
            (self.dir / name).mkdir()
        key = self.dir / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        for i in range(8):
            (self.dir / "gpus" / f"gpu{i}").symlink_to(os.devnull)
        (self.dir / "gres.conf").write_text(f"Name=gpu File={self.dir}/gpus/gpu[0-7]\n")
        nodes = len(self.nodes)
        port = free_ports(nodes + 1)
        text = TEMPLATE.read_text().format(
            dir=self.dir,
            host=socket.gethostname().partition(".")[0],
            bind_to_host_name="CommunicationParameters=NoCtldInAddrAny,NoInAddrAny" if host_is_loopback() else "",
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

    def start(self, name: str) -> None:
        if name in self.running():
            return
        if name == "munged":
            files = {"socket": "munge.socket", "key-file": "munge.key", "seed-file": "munge.seed"}
            files |= {"pid-file": "pids/munged.pid", "log-file": "log/munged.log"}
            # --force: munged takes a socket that only this user can reach for a mistake.
            command = ["munged", "--foreground", "--force", "--origin=127.0.0.1"]
            command += [f"--{option}={self.dir / file}" for option, file in files.items()]
        elif name == "slurmctld":
            command = ["slurmctld", "-D", "-f", str(self.conf)]
        else:
            command = [*KEEPER, "slurmd", "-D", "-N", name, "-f", str(self.conf)]
        Daemon(self.dir, name).start(command)

    # ---- down --------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """All that runs, whatever is left of its files. Nodes first: no job sees the controller go."""
        end_daemons(self.dir, "slurmd")
        kill_until_none(lambda: left_behind(self.dir), "what killed nodes left behind")
        end_daemons(self.dir, "slurmctld")
        end_daemons(self.dir, "munged")

    def remove_files(self) -> None:
        """Only what `up` made."""
        for name in DIRECTORIES:
            shutil.rmtree(self.dir / name, ignore_errors=True)
        for file in (*self.dir.glob("munge.*"), self.dir / "gres.conf", self.conf, self.settings_file):
            file.unlink(missing_ok=True)


# ---- commands --------------------------------------------------------------------------------------------------------


def up(cluster: Cluster, nodes: int, cpus_per_node: int) -> int:
    if nodes < 2 or cpus_per_node < 1:
        raise MiniSlurmError("--nodes must be 2 or more (train and rollout), --cpus-per-node 1 or more")
    if not is_installed():
        install()
    cluster.up({"nodes": nodes, "cpus_per_node": cpus_per_node})
    say(f"{nodes} nodes, files in {cluster.dir}")
    print(f"export SLURM_CONF={cluster.conf}")
    return 0


def down(cluster: Cluster) -> int:
    if not cluster.settings and not any(daemons_of(cluster.dir, program) for program in OPTIONS):
        say(f"no cluster in {cluster.dir}")
        return 0
    cluster.end()
    cluster.remove_files()
    if not cluster.dir.exists():
        say(f"{cluster.dir} was gone, its daemons were not")
    elif any(cluster.dir.iterdir()):
        say(f"{cluster.dir} stays: it holds other files")
    else:
        cluster.dir.rmdir()
    return 0


def status(cluster: Cluster) -> int:
    if not cluster.running():
        say(f"no cluster runs in {cluster.dir}")
        return 3
    missing = cluster.missing()
    if missing:
        say(f"not well: {', '.join(sorted(missing))}")
    if "slurmctld" not in missing:
        print(cluster.sinfo("--format=%12P %6a %6D %6t %N"), end="")
    return 1 if missing else 0


def known_node(cluster: Cluster, name: str) -> str:
    if name not in cluster.nodes:
        raise MiniSlurmError(f"no node {name!r} in {cluster.dir}, only: {', '.join(cluster.nodes) or 'no cluster'}")
    return name


def kill_node(cluster: Cluster, name: str) -> int:
    Daemon(cluster.dir, known_node(cluster, name)).end()
    return 0


def start_node(cluster: Cluster, name: str) -> int:
    cluster.start(known_node(cluster, name))
    cluster.wait_for({name})
    return 0


def checked_directory(text: str) -> Path:
    """Absolute. Raises MiniSlurmError unless slurm.conf can name it and it is, or can become, this user's own."""
    path = Path(text).absolute()
    if not re.fullmatch(r"[A-Za-z0-9/._+-]*", str(path)) or len(str(path)) > LONGEST_DIR:
        raise MiniSlurmError(f"--dir {path}: at most {LONGEST_DIR} characters, and only letters, digits and /._+-")
    if path.is_symlink() or (path.exists() and not (path.is_dir() and path.stat().st_uid == os.getuid())):
        raise MiniSlurmError(f"--dir {path} is not a directory of this user: choose another")
    return path


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A real Slurm on this host, for tests and for trying things out.")
    commands = parser.add_subparsers(required=True)
    directory = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"psrl-mini-slurm-{os.getuid()}"
    for run, text in {
        up: "start it, or what is missing of it, and print `export SLURM_CONF=...`",
        down: "end its jobs and daemons, remove its files",
        status: "print its partitions and nodes; exit code 0: all well, 1: something is missing, 3: it does not run",
        kill_node: "SIGKILL the slurmd, slurmstepd and job processes of a node",
        start_node: "start a killed node again",
    }.items():
        command = commands.add_parser(run.__name__.replace("_", "-"), help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("--dir", default=directory, help="its files (default: %(default)s)")
        if run is up:
            command.add_argument("--nodes", type=int, default=4, help="number of slurmd (default: %(default)s)")
            command.add_argument("--cpus-per-node", type=int, default=4, help="pretended (default: %(default)s)")
        if run in (kill_node, start_node):
            command.add_argument("name", help="n1, n2, ...")
    return parser.parse_args()


def main() -> int:
    arguments = vars(parsed_arguments())
    run, directory = arguments.pop("run"), arguments.pop("dir")
    try:
        with one_at_a_time() if run in (up, down) else nullcontext():
            return run(Cluster(checked_directory(directory)), **arguments)
    except MiniSlurmError as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
