"""A table of children: started, watched, restarted in place with a back-off, each end told as an event."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from psrl.supervisor.process import cap_log, describe_exit, has_ended, kill_group, reap_orphans, spawn, terminate

LOG_CAP_BYTES = 64 * 2**20
_LOG_CHECK_S = 10.0
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to run one child."""

    role: str
    name: str
    argv: tuple[str, ...]
    max_restarts: int = 0
    """How often it is started again after an end that nobody asked for."""
    critical: bool = False
    """The run cannot go on without it (goes with its events; the owner decides)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of all children."""
    cwd: Path | None = None
    cores: tuple[int, ...] | None = None
    oom_score_adj: int | None = None
    rlimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    death_signal: int = signal.SIGKILL
    ignored: tuple[int, ...] = (signal.SIGUSR2,)
    """Signals that it does not feel. Slurm signals every process of a step; what it means is the supervisor's decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEvent:
    """One child has ended. `cause` reads "signal SIGKILL" or "exit code 3".

    `finished`: it ended with exit code 0 or because it was told to. `restarting`: it will be started again.
    """

    role: str
    name: str
    generation: int
    pid: int
    returncode: int
    cause: str
    finished: bool
    restarting: bool
    critical: bool


def restart_delay_s(restarts: int) -> float:
    """Pause before restart number `restarts` (0 is the first): 0.5, 1, 2, ... at most 30 s."""
    return min(_FIRST_DELAY_S * 2.0 ** min(restarts, 16), _LONGEST_DELAY_S)


def judge_end(spec: ChildSpec, generation: int, pid: int, returncode: int, asked: bool) -> ChildEvent:
    """What the end of generation `generation` (0: the first start) means. `asked`: somebody had stopped it."""
    finished = asked or returncode == 0
    return ChildEvent(
        role=spec.role,
        name=spec.name,
        generation=generation,
        pid=pid,
        returncode=returncode,
        cause=describe_exit(returncode),
        finished=finished,
        restarting=not finished and generation < spec.max_restarts,
        critical=spec.critical,
    )


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    generation: int = 0
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    start_at: float | None = None  # monotonic time of the next start, None: none is planned
    asked: bool = False


class Children:
    """Starts children and reports their ends. Call everything from the main thread.

    `env` is the whole environment of every child; each gets its spec's variables and PSRL_GENERATION (0, 1, ...: how
    often it was started before) on top. Its output goes to `logs_dir/<name>.log`, capped at `log_cap_bytes`.
    """

    def __init__(self, logs_dir: Path, env: Mapping[str, str], log_cap_bytes: int = LOG_CAP_BYTES) -> None:
        self._logs_dir = logs_dir
        self._env = dict(env)
        self._log_cap_bytes = log_cap_bytes
        self._table: dict[str, _Child] = {}
        self._next_log_check = time.monotonic() + _LOG_CHECK_S

    def start(self, spec: ChildSpec) -> int:
        """Start a child at once; returns its pid. Raises ValueError if one of that name is running or planned."""
        known = self._table.get(spec.name)
        if known is not None and (known.process is not None or known.start_at is not None):
            raise ValueError(f"child {spec.name!r} is running already")
        child = _Child(spec)
        self._table[spec.name] = child
        return self._start(child)

    def poll(self, timeout_s: float) -> list[ChildEvent]:
        """Ends since the last call, waiting up to `timeout_s` for the first; starts what is due meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._start_due()
            self._check_logs()
            events = [self._end(child) for child in self._running() if has_ended(self._process(child))]
            left = deadline - time.monotonic()
            if events or left <= 0:
                reap_orphans([self._process(child) for child in self._running()])
                return events
            poller = select.poll()
            for descriptor in self.waitables():
                poller.register(descriptor, select.POLLIN)
            poller.poll(1000 * min(left, self.due_in_s()) + 1)

    def stop(self, name: str, grace_s: float) -> None:
        """End one child on purpose: SIGTERM, then SIGKILL to its group. Its event comes with the next `poll`."""
        child = self._table[name]
        child.asked, child.start_at = True, None
        if child.process is not None:
            os.kill(child.process.pid, signal.SIGTERM)
            if not has_ended(child.process, grace_s):
                kill_group(child.process)
                has_ended(child.process, grace_s)

    def let_end(self) -> None:
        """From now on every end is expected, and nothing is started again."""
        for child in self._table.values():
            child.asked, child.start_at = True, None

    def stop_all(self, grace_s: float) -> list[int]:
        """End all children and everything below them (`process.terminate`); returns pids that would not end."""
        running = self._running()
        self.let_end()
        stuck = terminate([self._process(child) for child in running], grace_s)
        for child in running:
            self._forget(child)
        return stuck

    def running(self) -> dict[str, int]:
        """Name -> pid of the children that run now."""
        return {child.spec.name: self._process(child).pid for child in self._running()}

    def alive(self) -> list[str]:
        """Names of the children that run or will be started again."""
        return [name for name, child in self._table.items() if child.process is not None or child.start_at is not None]

    def waitables(self) -> list[int]:
        """Descriptors that become readable when a child ends."""
        return [child.pidfd for child in self._running()]

    def due_in_s(self) -> float:
        """Seconds until the next start or log check."""
        due = [child.start_at for child in self._table.values() if child.start_at is not None]
        return max(0.0, min([*due, self._next_log_check]) - time.monotonic())

    def _running(self) -> list[_Child]:
        return [child for child in self._table.values() if child.process is not None]

    def _process(self, child: _Child) -> subprocess.Popen[bytes]:
        assert child.process is not None
        return child.process

    def _start(self, child: _Child) -> int:
        spec = child.spec
        log_path = self._logs_dir / f"{spec.name}.log"
        cap_log(log_path, self._log_cap_bytes)
        child.process = spawn(
            spec.argv,
            env={**self._env, **spec.env, "PSRL_GENERATION": str(child.generation)},
            log_path=log_path,
            cwd=spec.cwd,
            cores=spec.cores,
            oom_score_adj=spec.oom_score_adj,
            rlimits=spec.rlimits,
            death_signal=spec.death_signal,
            ignored=spec.ignored,
        )
        child.pidfd = os.pidfd_open(child.process.pid)
        child.start_at = None
        return child.process.pid

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._table.values():
            if child.start_at is not None and child.start_at <= now:
                child.generation += 1
                self._start(child)

    def _end(self, child: _Child) -> ChildEvent:
        process = self._process(child)
        kill_group(process)  # what it started must not hold its GPU, ports or files any longer
        event = judge_end(child.spec, child.generation, process.pid, process.wait(), child.asked)
        self._forget(child)
        if event.restarting:
            child.start_at = time.monotonic() + restart_delay_s(child.generation)
        level = logging.INFO if event.finished else logging.WARNING
        again = ", starting it again" if event.restarting else ""
        _logger.log(level, "%s %s ended: %s%s", event.role, event.name, event.cause, again)
        return event

    def _forget(self, child: _Child) -> None:
        os.close(child.pidfd)
        child.process, child.pidfd = None, -1

    def _check_logs(self) -> None:
        if time.monotonic() < self._next_log_check:
            return
        self._next_log_check = time.monotonic() + _LOG_CHECK_S
        for name in self._table:
            cap_log(self._logs_dir / f"{name}.log", self._log_cap_bytes)
