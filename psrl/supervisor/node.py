"""One node's supervisor: starts this node's roles, restarts what may be restarted, tells the coordinator, ends them all.

`python -m psrl.supervisor.node RUN_DIR NAME --group trainer|rollout`. It is a child subreaper and every role dies with
it, so nothing outlives the run. It does no work itself and imports nothing heavy.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

from psrl.config.schema import Config
from psrl.net.link import CoordinatorGoneError, CoordinatorLink
from psrl.net.waiting import Wakeup, wait
from psrl.outcome import FAILED, Outcome, publish_outcome, read_outcome
from psrl.protocol import control as c
from psrl.role import load_config, setup_logging
from psrl.rundir.layout import RunDir
from psrl.rundir.node_local import node_local_env, node_local_root, sweep_shm
from psrl.supervisor.children import ChildEvent, Children, ChildSpec
from psrl.supervisor.process import become_subreaper
from psrl.telemetry.incidents import IncidentLog

log = logging.getLogger("psrl.supervisor")

VERDICT_GRACE_S = 5.0
"""After the death of a part that the run cannot do without, the coordinator has this long to end the run."""
LEAVE_GRACE_S = 10.0
"""Roles leave by themselves after the verdict; then they are ended."""
UNHEARD_GRACE_S = 2.0
"""The same when no coordinator was there to tell them."""


def trainer_children(config: Config, run_dir: RunDir) -> list[ChildSpec]:
    """The coordinator, the trainer ranks and the dashboard logger."""
    deployment, faults = config.psrl.deployment, config.psrl.fault_tolerance
    cores = _cores(deployment.train_cores)
    ranks = deployment.train_nnodes * deployment.train_ngpus_per_node
    children = [
        _child(
            "coordinator",
            "coordinator",
            "psrl.coordinator.service",
            run_dir,
            cores=cores,
            max_restarts=faults.coordinator_max_restarts,
            critical=True,
        )
    ]
    for rank in range(ranks):
        env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": str(deployment.train_cpu_threads)}
        children.append(
            _child("trainer", f"trainer-{rank}", "psrl.trainer.main", run_dir, env=env, cores=cores, critical=True)
        )
    if "wandb" in config.trainer.logger:
        children.append(
            ChildSpec(
                role="logger",
                name="wandb",
                argv=(sys.executable, "-m", "psrl.telemetry.wandb_logger", str(run_dir.path)),
                cores=cores,
            )
        )
    return children


def rollout_children(config: Config, run_dir: RunDir) -> list[ChildSpec]:
    """The instances and agent loops."""
    deployment, faults = config.psrl.deployment, config.psrl.fault_tolerance
    cores = _cores(deployment.rollout_cores)
    env = {"OMP_NUM_THREADS": str(deployment.rollout_cpu_threads)}
    instances = [
        _child(
            "instance",
            f"instance-{i}",
            "psrl.rollout.instance",
            run_dir,
            env=env,
            cores=cores,
            max_restarts=faults.max_restarts,
        )
        for i in range(deployment.n_rollout_instances)
    ]
    loops = [
        _child(
            "agent_loop",
            f"agent-loop-{i}",
            "psrl.rollout.agent_worker",
            run_dir,
            cores=cores,
            max_restarts=faults.agent_loop_max_restarts,
        )
        for i in range(deployment.n_agent_loops)
    ]
    return instances + loops


def _cores(cores: list[int] | None) -> tuple[int, ...] | None:
    return None if cores is None else tuple(cores)


def _child(role: str, name: str, module: str, run_dir: RunDir, **kwargs) -> ChildSpec:
    return ChildSpec(role=role, name=name, argv=(sys.executable, "-m", module, str(run_dir.path), name), **kwargs)


class NodeSupervisor:
    """The loop of one supervisor process."""

    def __init__(self, run_dir: RunDir, name: str, group: str) -> None:
        self.run_dir, self.name, self.group = run_dir, name, group
        self.config = load_config(run_dir)
        self.specs = (
            trainer_children(self.config, run_dir) if group == "trainer" else rollout_children(self.config, run_dir)
        )
        self.children = Children(run_dir.logs, role_environment(run_dir))
        self.incidents = IncidentLog(run_dir.logs, name)
        self.link = CoordinatorLink(run_dir, "supervisor", name, self._state, self.config.psrl.fault_tolerance)
        self.wakeup = Wakeup()
        self.signal_seen = ""
        self.drain_sent = False
        self.unsent: list[c.Message] = []
        self.gone: list[c.ChildDown] = []
        self.verdict: Outcome | None = None
        self.leave_grace_s = UNHEARD_GRACE_S
        self.give_up_at: float | None = None
        self.cause = ""

    def _state(self) -> c.SupervisorState:
        return c.SupervisorState(children=self.children.alive(), gone=self.gone)

    def run(self) -> int:
        """Start the roles, watch them until the verdict, end them. Exit code 0 only for a completed run."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        for spec in self.specs:
            self.children.start(spec)
        while self.verdict is None:
            wait([self.children, self.link, self.wakeup], 1.0)
            self.wakeup.clear()
            for event in self.children.poll(0.0):
                self._child_ended(event)
            self._talk()
            self._check_deadlines()
        self._end_children()
        return 0 if self.verdict.status == "completed" else 1

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signal_seen = signal.Signals(number).name
        self.wakeup.set()

    def _talk(self) -> None:
        """Say what is to be said, hear the verdict."""
        try:
            messages = self.link.poll(0.0)
        except CoordinatorGoneError as error:
            self._fail(str(error))
            return
        for message in messages:
            if isinstance(message, c.Shutdown):
                self.verdict = Outcome(status=message.status, cause=message.cause)
                self.leave_grace_s = LEAVE_GRACE_S
        if self.signal_seen and not self.drain_sent:
            drain = c.Drain(
                reason=f"{self.signal_seen} at {self.name}", grace_s=self.config.psrl.fault_tolerance.drain_grace_s
            )
            self.unsent.append(drain)
            self.drain_sent = True
            self.give_up_at = time.monotonic() + self.config.psrl.fault_tolerance.drain_grace_s
            self.cause = f"{self.signal_seen}, and the drain took more than psrl.fault_tolerance.drain_grace_s"
        while self.unsent and self.link.send(self.unsent[0]):
            self.unsent.pop(0)

    def _child_ended(self, event: ChildEvent) -> None:
        if event.finished and event.returncode == 0:
            return
        self.incidents.write(role=event.role, name=event.name, cause=event.cause, restarting=event.restarting)
        if event.role == "logger":
            return
        down = c.ChildDown(
            role=event.role, name=event.name, cause=event.cause, restarting=event.restarting, pid=event.pid
        )
        self.unsent.append(down)
        if not event.restarting:
            self.gone.append(down)
        if event.critical and not event.restarting:
            self.give_up_at = time.monotonic() + (0.0 if event.role == "coordinator" else VERDICT_GRACE_S)
            self.cause = f"{event.name} ended by {event.cause}"

    def _check_deadlines(self) -> None:
        if self.verdict is None and not self.link.connected:
            self.verdict = read_outcome(self.run_dir)  # the verdict may have been spoken while nobody listened
        if self.verdict is None and self.give_up_at is not None and time.monotonic() >= self.give_up_at:
            self._fail(self.cause)

    def _fail(self, cause: str) -> None:
        """No coordinator is left to say so: the run has failed."""
        publish_outcome(self.run_dir, Outcome(status=FAILED, cause=cause))
        self.verdict = read_outcome(self.run_dir)
        log.error("%s", cause)

    def _end_children(self) -> None:
        """Roles have heard the verdict and leave; whoever does not is ended."""
        assert self.verdict is not None
        log.info("the run is over: %s %s", self.verdict.status, self.verdict.cause)
        self.children.let_end()
        deadline = time.monotonic() + self.leave_grace_s
        while self.children.alive() and time.monotonic() < deadline:
            self.children.poll(0.2)
            try:
                self.link.poll(0.0)
            except CoordinatorGoneError:
                break
        if stuck := self.children.stop_all(1.0):
            log.error("these processes could not be ended: %s", stuck)
        self.link.close()


def role_environment(run_dir: RunDir) -> dict[str, str]:
    """The environment of every role: node-local caches, the run's own code first, no downloads."""
    env = dict(os.environ)
    root = node_local_root()
    env |= node_local_env(root, run_dir.path) | {"PSRL_NODE_LOCAL": str(root.parent)}
    paths = [str(run_dir.code), *(p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    env.setdefault("HF_HUB_OFFLINE", "1")
    env.setdefault("TRANSFORMERS_OFFLINE", "1")
    env.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too: a log is no terminal
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("PYTHONHASHSEED", "0")
    return env


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("--group", choices=("trainer", "rollout"), required=True)
    args = parser.parse_args()
    os.umask(0o077)
    setup_logging(args.name)
    become_subreaper()
    sweep_shm()
    return NodeSupervisor(RunDir(args.run_dir.resolve()), args.name, args.group).run()


if __name__ == "__main__":
    raise SystemExit(main())
