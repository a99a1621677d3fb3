"""More instances for a running run: `python -m psrl.join RUN_DIR`. The run's directory is all that a joiner needs.

Its roles run under a supervisor of its own and may be taken away at any time: after SIGTERM, SIGUSR2 or Ctrl-C they hand
back what they have, and SIGKILL loses nothing either. It waits for a run that has not begun or is requeued, and ends with
the run.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.coordinator.joiners import REFUSED
from psrl.gpus import NodeGpus, visible_gpus
from psrl.net.client import Client
from psrl.net.link import COORDINATOR
from psrl.outcome import COMPLETED, FAILED, read_outcome
from psrl.protocol.control import JOINER, FromCoordinator
from psrl.role import load_config, setup_logging
from psrl.rundir.endpoints import Endpoint, latest_endpoint
from psrl.rundir.keys import load_keys
from psrl.rundir.layout import RunDir
from psrl.rundir.snapshot import package_dir
from psrl.supervisor.children import ChildSpec
from psrl.supervisor.node import NodeSupervisor, become_supervisor, role_environment
from psrl.supervisor.specs import NO_GPUS, agent_loop_child, instance_child

log = logging.getLogger("psrl.join")

LOOK_S = 1.0
"""Pause between two looks for the run."""
CONNECT_S = 5.0
"""A coordinator that lets nobody connect for this long is looked for anew."""
EXIT_FAILED, EXIT_REFUSED = 1, 2


def main() -> int:
    """0 when the run is over or out of reach or this joiner was asked to leave, 1 if its roles could not work here, 2 for
    bad input."""
    args = _parse()
    run_dir = RunDir(args.run_dir.expanduser().resolve())
    name = joiner_name(os.environ, socket.gethostname(), os.getpid())
    try:
        _check(run_dir, args)
        _continue_in_the_runs_code(run_dir)
        load_keys(run_dir)
        become_supervisor(name)
    except (ConfigError, OSError) as error:
        print(f"psrl: {error}", file=sys.stderr)
        return EXIT_REFUSED
    setup_logging(name, sys.stdout)
    wait_s = args.wait_s or load_config(run_dir).psrl.fault_tolerance.join_wait_s
    return Joiner(run_dir, name, args.instances, args.agent_loops, wait_s).run()


@dataclass(slots=True)
class Joiner:
    """`signals` are those that have come while no supervisor ran; any of them asks this joiner to leave."""

    run_dir: RunDir
    name: str
    num_instances: int
    num_agent_loops: int
    wait_s: float
    signals: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Join, and join again when the run goes on after an interruption. Returns the exit code."""
        while True:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                signal.signal(number, lambda n, _frame: self.signals.append(n))
            coordinator = self._wait_for_run()
            if coordinator is None:
                return 0
            code = self._supervise(coordinator)
            if code is not None:
                return code

    def _wait_for_run(self) -> Endpoint | None:
        """The coordinator, once it answers; None, after saying why, if there is nothing to join."""
        deadline, told = time.monotonic() + self.wait_s, ""
        while not self.signals:
            outcome, found = read_outcome(self.run_dir), latest_endpoint(self.run_dir, COORDINATOR)
            if outcome is not None and outcome.status in (COMPLETED, FAILED):
                log.info("nothing to join, the run is over: %s %s", outcome.status, outcome.cause)
                return None
            if outcome is not None:
                lacking = "it was interrupted and has not gone on"
            elif found is None:
                lacking = "it has no coordinator yet"
            elif trouble := self._trouble(found[1].address):
                lacking = f"its coordinator at {found[1].address} cannot be reached: {trouble}"
            else:
                return found[1]
            if time.monotonic() >= deadline:
                log.info("there was no run to join in %s for %g s: %s", self.run_dir.path, self.wait_s, lacking)
                return None
            if lacking != told:
                log.info("waiting for the run in %s: %s", self.run_dir.path, lacking)
                told = lacking
            time.sleep(LOOK_S)
        log.info("leaving after %s: no run was joined", signal.Signals(self.signals[0]).name)
        return None

    def _trouble(self, address: str) -> str | None:
        """Why no connection with the coordinator comes about; None if one does."""
        client, deadline = (
            Client(load_keys(self.run_dir), FromCoordinator, name=self.name),
            time.monotonic() + CONNECT_S,
        )
        client.connect(address)
        try:
            while not client.established:
                if self.signals or time.monotonic() >= deadline:
                    hint = " (a run of a single host is joined on that host)" if is_loopback(address) else ""
                    return f"{client.trouble or 'it does not answer'}{hint}"
                client.poll(0.2)
            return None
        finally:
            client.close(0.0)

    def _supervise(self, coordinator: Endpoint) -> int | None:
        """Run the roles until they or the run have ended. Returns the exit code, None if the run may go on later."""
        os.environ.update(role_place(coordinator.address, self.name, os.environ))
        gpus = NodeGpus(visible_gpus(os.environ))
        specs = joined_children(
            load_config(self.run_dir), self.run_dir, self.name, self.num_instances, self.num_agent_loops, gpus
        )
        supervisor = NodeSupervisor(self.run_dir, self.name, specs, joined=True, early_signals=self.signals)
        log.info("joining the run at %s with %s", coordinator.address, ", ".join(spec.name for spec in specs))
        supervisor.run()
        verdict = supervisor.verdict
        if supervisor.signal_seen:
            log.info("left after %s", supervisor.signal_seen)
            return 0
        if verdict is None:
            log.error("all that joined has failed: see the logs of *-%s-* in %s", self.name, self.run_dir.logs)
            return EXIT_FAILED
        if verdict.status == REFUSED:
            log.error("the run goes on without this joiner: %s", verdict.cause)
            return EXIT_FAILED
        return 0 if verdict.status in (COMPLETED, FAILED) else None


def joiner_name(environ: Mapping[str, str], host: str, pid: int) -> str:
    """Unique among all joiners of a run, also after a requeue.

    >>> joiner_name({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, "n1", 4711)
    'join-12-0-3'
    >>> joiner_name({}, "n1.site", 4711)
    'join-n1-site-4711'
    """
    if "SLURM_JOB_ID" not in environ:
        return f"{JOINER}{re.sub(r'[^A-Za-z0-9]+', '-', host).strip('-')}-{pid}"
    job, restarts, task = (environ.get(f"SLURM_{key}", "0") for key in ("JOB_ID", "RESTART_COUNT", "PROCID"))
    step = environ.get("SLURM_STEP_ID")  # by hand in an allocation there may be several outside any step
    return f"{JOINER}{job}-{restarts}-{task}" + ("" if step == "0" else f"-p{pid}" if step is None else f"-s{step}")


def joined_children(
    config: Config, run_dir: RunDir, joiner: str, num_instances: int, num_agent_loops: int, gpus: NodeGpus = NO_GPUS
) -> list[ChildSpec]:
    """What a joiner's supervisor starts. `gpus`: of its node, all for its instances."""
    instances = [instance_child(config, run_dir, f"instance-{joiner}-{i}", gpus, i) for i in range(num_instances)]
    return instances + [agent_loop_child(config, run_dir, f"agent-loop-{joiner}-{i}") for i in range(num_agent_loops)]


def role_place(address: str, joiner: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What tells the roles where they are: on loopback as the run whose coordinator is there, else on this node."""
    local = is_loopback(address)
    node = "local" if local else environ.get("SLURMD_NODENAME", socket.gethostname())
    return {"PSRL_LOCAL": "1" if local else "0", "PSRL_NODE": node, "PSRL_ATTEMPT": joiner}


def is_loopback(address: str) -> bool:
    """Of an endpoint such as tcp://127.0.0.1:41234."""
    return ipaddress.ip_address(address.removeprefix("tcp://").rpartition(":")[0]).is_loopback


def _parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m psrl.join", description="Add instances to a running run.")
    parser.add_argument("run_dir", type=Path, help="the directory of the run")
    parser.add_argument("--instances", type=int, default=1, help="rollout instances to add (default: 1)")
    parser.add_argument(
        "--agent-loops",
        type=int,
        default=0,
        help="agent loops to add (default: 0; the groups of one that leaves begin anew, those of an instance go on)",
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        help="longest wait for a run that is not there (default: psrl.fault_tolerance.join_wait_s)",
    )
    return parser.parse_args(argv)


def _check(run_dir: RunDir, args: argparse.Namespace) -> None:
    if args.instances < 0 or args.agent_loops < 0 or args.instances + args.agent_loops == 0:
        raise ConfigError(
            f"--instances {args.instances} --agent-loops {args.agent_loops} is refused: neither may be below 0, and one of "
            "them must be at least 1."
        )
    if args.wait_s is not None and not args.wait_s > 0:
        raise ConfigError(f"--wait-s {args.wait_s:g} is refused: it must be greater than 0.")
    if not run_dir.config.is_file():
        raise ConfigError(
            f"{run_dir.path} is no run directory, it has no {run_dir.config.name}: give the one that the run printed as "
            "run_dir=."
        )


def _continue_in_the_runs_code(run_dir: RunDir) -> None:
    """Replace this program by the run's own copy of it: all roles of a run are of one version. Modules of the user are
    found in the current directory as before, but only behind that copy."""
    if package_dir() != run_dir.code / "psrl" and (run_dir.code / "psrl").is_dir():
        environment = role_environment(run_dir)
        environment["PYTHONPATH"] += os.pathsep + str(Path.cwd())
        environment["PYTHONSAFEPATH"] = "1"
        os.execve(sys.executable, [sys.executable, "-m", "psrl.join", *sys.argv[1:]], environment)


if __name__ == "__main__":
    raise SystemExit(main())
