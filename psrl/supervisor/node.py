"""One node's supervisor: starts this node's roles, restarts what may be restarted, tells the coordinator, ends them all.

It is a child subreaper and every role dies with it, so nothing outlives the run. It does no work itself and imports
nothing heavy. `python -m psrl.supervisor.node RUN_DIR NAME` runs a share of the deployment on this host.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from psrl.deployment import one_host
from psrl.gpus import visible_gpus
from psrl.net.link import CoordinatorGoneError, CoordinatorLink
from psrl.net.waiting import Wakeup, wait
from psrl.outcome import FAILED, INTERRUPTED, Outcome, current_outcome, publish_outcome
from psrl.protocol import control as c
from psrl.role import load_config, setup_logging
from psrl.rundir.layout import RunDir
from psrl.rundir.node_local import node_local_env, node_local_root, node_store_path, sweep_shm
from psrl.supervisor.children import ChildEvent, Children, ChildSpec
from psrl.supervisor.process import become_subreaper
from psrl.supervisor.specs import share_children
from psrl.telemetry.incidents import IncidentLog

log = logging.getLogger("psrl.supervisor")

VERDICT_GRACE_S = 5.0
"""After the death of a part that the run cannot do without, the coordinator has this long to end the run."""
LEAVE_GRACE_S = 10.0
"""Roles leave by themselves after the verdict; then they are ended."""
UNHEARD_GRACE_S = 2.0
"""The same when no coordinator was there to tell them."""
WARNING_RESERVE_S = 20.0
"""Of Slurm's early warning this much is kept for the end itself: roles leave, the batch script requeues."""


class NodeSupervisor:
    """The loop of one supervisor process. One that `joined` a running run may come and go: its signals and its end are
    no matter of the run's, and it gives no verdict on it. `early_signals` came before there was a supervisor. `owner` is the parent's pid: without it nobody
    could end this node's part any more, so it ends itself."""

    def __init__(
        self,
        run_dir: RunDir,
        name: str,
        specs: Sequence[ChildSpec],
        *,
        joined: bool = False,
        early_signals: Sequence[int] = (),
        owner: int | None = None,
    ) -> None:
        self.run_dir, self.name, self.specs, self.joined = run_dir, name, specs, joined
        self.early_signals, self.owner = early_signals, owner
        self.local = os.environ.get("PSRL_LOCAL") == "1"
        self.config = load_config(run_dir)
        self.children = Children(run_dir.logs, role_environment(run_dir))
        self.incidents = IncidentLog(run_dir.logs, name)
        self.link = CoordinatorLink(run_dir, "supervisor", name, self._state, self.config.psrl.fault_tolerance)
        self.wakeup = Wakeup()
        self.signal_seen = ""
        self.leave_by: float | None = None
        """After a signal: when this node is to be free."""
        self.unsent: list[c.Message] = []
        self.gone: list[c.ChildDown] = []
        self.verdict: Outcome | None = None
        self.leave_grace_s = UNHEARD_GRACE_S
        self.give_up_at: float | None = None
        self.given_up = Outcome(status=FAILED)
        """The verdict at `give_up_at` if there is no other by then."""

    def _state(self) -> c.SupervisorState:
        return c.SupervisorState(children=self.children.alive(), gone=self.gone, joined=self.joined)

    def run(self) -> int:
        """Start the roles, watch them until the verdict, end them. Exit code 1 for a failed run only: one that is to go
        on later is no failure."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        for early in self.early_signals:
            self._on_signal(early, None)
        for spec in self.specs:
            self.children.start(spec)
        while self.verdict is None and not (self.joined and not self.children.alive()):
            wait([self.children, self.link, self.wakeup], 1.0)
            self.wakeup.clear()
            for event in self.children.poll(0.0):
                self._child_ended(event)
            self._talk()
            self._check_deadlines()
        self._end_children()
        return 1 if self.verdict is not None and self.verdict.status == FAILED else 0

    def _on_signal(self, number: int, _frame: object | None) -> None:
        self.signal_seen = signal.Signals(number).name
        self.wakeup.set()

    def _talk(self) -> None:
        """Say what is to be said, hear the verdict."""
        try:
            messages = self.link.poll(0.0)
        except CoordinatorGoneError as error:
            # Where a scheduler starts the run again, a coordinator out of reach means a lost node; here it means a crash.
            self._give_up(Outcome(status=FAILED if self.local else INTERRUPTED, cause=str(error)))
            return
        for message in messages:
            if isinstance(message, c.Welcome) and self.leave_by is not None:
                self._tell_signal()  # the coordinator that heard it may be gone
            if isinstance(message, c.Shutdown):
                self.verdict = Outcome(status=message.status, cause=message.cause)
                self.leave_grace_s = LEAVE_GRACE_S
        if self.signal_seen and self.leave_by is None:
            self.leave_by = time.monotonic() + self._grace_s()
            self._tell_signal()
        while self.unsent and self.link.send(self.unsent[0]):
            self.unsent.pop(0)

    def _tell_signal(self) -> None:
        """The scheduler or the user wants this node back: the run drains; what joined leaves alone."""
        assert self.leave_by is not None
        reason, grace_s = f"{self.signal_seen} at {self.name}", max(0.0, self.leave_by - time.monotonic())
        if self.joined:
            self.unsent.append(c.Leave(children=self.children.alive(), reason=reason, grace_s=grace_s))
        else:
            self.unsent.append(c.Drain(reason=reason, grace_s=grace_s))
        self.give_up_at = self.leave_by + VERDICT_GRACE_S
        self.given_up = Outcome(status=INTERRUPTED, cause=f"{reason}, and no coordinator gave a verdict in time")

    def _grace_s(self) -> float:
        """What is left after the signal: a batch script that asks Slurm for an early warning says how early."""
        if self.signal_seen == "SIGUSR2" and (delay := os.environ.get("PSRL_SIGNAL_DELAY_S")):
            return max(1.0, float(delay) - WARNING_RESERVE_S)
        return self.config.psrl.fault_tolerance.drain_grace_s

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
            self.given_up = Outcome(status=FAILED, cause=f"{event.name} ended by {event.cause}")

    def _check_deadlines(self) -> None:
        if self.owner is not None and os.getppid() != self.owner:
            log.error("the process that started this supervisor is gone: everything here ends at once")
            self.verdict, self.leave_grace_s = Outcome(status=INTERRUPTED, cause="the node lost its job step"), 0.0
        if self.verdict is None and not self.link.connected:
            self.verdict = current_outcome(self.run_dir)  # it may have been spoken while nobody listened
        if self.verdict is None and self.give_up_at is not None and time.monotonic() >= self.give_up_at:
            self._give_up(self.given_up)

    def _give_up(self, outcome: Outcome) -> None:
        """No coordinator is left to give the verdict; one that joined only leaves."""
        log.error("%s", outcome.cause)
        if self.joined:
            self.verdict = Outcome(status=INTERRUPTED, cause=outcome.cause)
        else:
            publish_outcome(self.run_dir, outcome)
            self.verdict = current_outcome(self.run_dir)

    def _end_children(self) -> None:
        """Roles have heard the verdict and leave; whoever does not is ended."""
        if self.verdict is not None:
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
        node_store_path(self.run_dir.path).unlink(missing_ok=True)


def role_environment(run_dir: RunDir) -> dict[str, str]:
    """The environment of every role: node-local caches, the run's own code first, the user's modules in the working
    directory last, no downloads."""
    env = dict(os.environ)
    root = node_local_root()
    env |= node_local_env(root, run_dir.path) | {"PSRL_NODE_LOCAL": str(root.parent)}
    paths = [str(run_dir.code), *(p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p)]
    paths.append(str(Path.cwd()))
    env["PYTHONSAFEPATH"] = "1"  # or the working directory would come first, and with it another psrl
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    env.setdefault("HF_HUB_OFFLINE", "1")
    env.setdefault("TRANSFORMERS_OFFLINE", "1")
    env.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too: a log is no terminal
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env["PYTHONHASHSEED"] = hash_seed(env.get("PYTHONHASHSEED", ""))
    return env


def hash_seed(given: str) -> str:
    """A user's own number is kept. Anything else, "random" too, becomes 0: otherwise hash() of a text differs from process to process,
    and so do names that are made with it, as LMCache makes them where it falls back to hash(). Our own (psrl.protocol.blocks) do not
    depend on it.

    >>> [hash_seed(given) for given in ("", "random", "7")]
    ['0', '0', '7']
    """
    return given if given.isascii() and given.isdigit() else "0"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name", help="of the share: supervisor-trainer or supervisor-rollout")
    args = parser.parse_args()
    become_supervisor(args.name)
    run_dir = RunDir(args.run_dir.resolve())
    config = load_config(run_dir)
    share = next(s for s in one_host(config.psrl.deployment) if s.name == args.name)
    return NodeSupervisor(run_dir, args.name, share_children(config, run_dir, share, visible_gpus(os.environ))).run()


def node_scratch(run_dir: RunDir) -> Path:
    """The run's temporary directory on this node, which is to be removed when the run leaves the node."""
    return Path(node_local_env(node_local_root(), run_dir.path)["TMPDIR"])


def become_supervisor(name: str, log_path: Path | None = None) -> None:
    """What a supervising process does first: private files, a log, adoption of orphans, sweep of what a crash left."""
    os.umask(0o077)
    setup_logging(name, None if log_path is None else log_path.open("a", buffering=1))
    become_subreaper()
    sweep_shm()


if __name__ == "__main__":
    raise SystemExit(main())
