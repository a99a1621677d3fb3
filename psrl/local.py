"""The local launcher: the same roles, messages and run directory as on a cluster, as processes of this host."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psrl.conclusion import conclude, write_summary_and_report
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.deployment import one_host
from psrl.outcome import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    Outcome,
    begin_attempt,
    current_outcome,
    publish_outcome,
    read_outcome,
)
from psrl.rundir.layout import RunDir
from psrl.setup_run import already_completed, choose_run_dir, completed_before, lay_out
from psrl.supervisor.node import role_environment
from psrl.supervisor.process import become_subreaper, describe_exit, spawn, terminate
from psrl.telemetry.metrics import MetricsTail, read_metrics, surviving
from psrl.telemetry.progress import Progress

EXIT_CODES = {COMPLETED: 0, FAILED: 1, INTERRUPTED: 130}
END_GRACE_S = 30.0
"""After the drain's own time the supervisors have this long to end their roles."""


def run_locally(config: Config, sweep: Mapping[str, Any] | None = None) -> int:
    """Lay out (or resume) the run directory, start both supervisors, show progress, write summary and report."""
    run_dir = RunDir(choose_run_dir(config))
    if run_dir.config.exists():
        refuse_running(run_dir)
    if done := completed_before(run_dir, config):
        print(already_completed(run_dir, done))
        return 0
    fresh = not run_dir.path.exists()
    with claimed(run_dir):
        resuming = read_outcome(run_dir) is not None or bool(read_metrics(run_dir.metrics))
        lay_out(run_dir, config, sweep)
        prepare = [sys.executable, "-m", "psrl.prepare", str(run_dir.path), "--parent", str(os.getpid())]
        prepared = subprocess.run(prepare, env=role_environment(run_dir) | {"PSRL_LOCAL": "1"})
        if prepared.returncode != 0:
            if fresh:  # a run that was refused leaves nothing behind
                shutil.rmtree(run_dir.path)
            return prepared.returncode if prepared.returncode > 0 else 1
        return start(run_dir, config, resuming)


def start(run_dir: RunDir, config: Config, resuming: bool) -> int:
    """All that comes after the checks: the roles, the verdict, the report. Returns the exit code."""
    print(f"psrl: {'resuming' if resuming else 'starting'} in {run_dir.path}", flush=True)
    os.environ["PSRL_ATTEMPT"] = f"{len(list(run_dir.ledger.iterdir()))}-{secrets.token_hex(3)}"
    begin_attempt(run_dir)
    outcome = watch(run_dir, config)
    write_summary_and_report(run_dir, page=config.trainer.report)
    conclude(run_dir, outcome, f"the same command with run_dir={run_dir.path} goes on from the last checkpoint")
    return EXIT_CODES[outcome.status]


@contextmanager
def claimed(run_dir: RunDir) -> Iterator[None]:
    """Make the run directory and hold it for this process: of two launchers, also at the same moment, one is refused."""
    try:
        run_dir.create()
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir.path} cannot be used: {error}.") from error
    refuse_running(run_dir)
    mark = _launcher_mark(run_dir)
    mark.unlink(missing_ok=True)  # of a launcher that was killed
    own = mark.with_name(f"{mark.name}.{os.getpid()}")
    own.write_text(f"{os.getpid()} {_start_time(os.getpid())}")
    try:
        os.link(own, mark)
    except FileExistsError:
        raise ConfigError(
            f"run_dir={run_dir.path} is being started by another process: choose another run_dir."
        ) from None
    finally:
        own.unlink()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def refuse_running(run_dir: RunDir) -> None:
    """One launcher a run directory on one host at a time."""
    mark = _launcher_mark(run_dir)
    if mark.exists():
        pid, started = mark.read_text().split()
        if _start_time(int(pid)) == started:
            raise ConfigError(
                f"run_dir={run_dir.path} is in use by process {pid}: wait for it, stop it (kill -INT {pid}), or choose another run_dir."
            )


def watch(run_dir: RunDir, config: Config) -> Outcome:
    """Start the supervisors and stay until the verdict; Ctrl-C and SIGTERM ask for a drain, a second one ends at once."""
    become_subreaper()
    env = role_environment(run_dir) | {"PSRL_LOCAL": "1", "PSRL_NODE": "local"}
    seen: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _frame: seen.append(n))
    supervisors = {
        name: spawn(_command(run_dir, name), env=env, log_path=run_dir.logs / f"{name}.log")
        for name in (share.name for share in one_host(config.psrl.deployment))
    }
    tail, progress = MetricsTail(run_dir.metrics), Progress(config.trainer.total_training_steps, sys.stdout)
    for row in surviving(tail.poll())[-1:]:
        progress.update(row)
    asked, deadline = 0, float("inf")
    try:
        while (outcome := current_outcome(run_dir)) is None:
            time.sleep(0.2)
            for row in tail.poll():
                progress.update(row)
            if len(seen) > asked:
                asked = len(seen)
                if asked > 1:
                    break
                progress.note("psrl: draining: checkpoint, then end (again to end at once)")
                deadline = time.monotonic() + config.psrl.fault_tolerance.drain_grace_s + END_GRACE_S
                for process in supervisors.values():
                    process.send_signal(seen[0])  # the verdict names the signal that the user sent
            dead = next((name for name, p in supervisors.items() if p.poll() is not None), None)
            if dead is not None and current_outcome(run_dir) is None:
                cause = f"{dead} ended by {describe_exit(supervisors[dead].returncode)}"
                publish_outcome(run_dir, Outcome(status=FAILED, cause=cause))
                for process in supervisors.values():
                    process.send_signal(signal.SIGTERM)  # what is left of the run keeps what it has done
            if time.monotonic() > deadline:
                break
        if outcome is not None:
            _wait_all(supervisors.values(), END_GRACE_S)
        for row in tail.poll():
            progress.update(row)
    finally:
        progress.close()
        stuck = terminate(list(supervisors.values()), 0.0 if asked > 1 else 5.0)
        if stuck:
            print(f"psrl: these processes could not be ended: {stuck}", file=sys.stderr)
    publish_outcome(run_dir, Outcome(status=INTERRUPTED, cause="ended at once by the user"))
    verdict = current_outcome(run_dir)
    assert verdict is not None  # published above at the latest
    return verdict


def _launcher_mark(run_dir: RunDir) -> Path:
    """Pid and start time of the launcher that holds the run directory."""
    return run_dir.rendezvous / "launcher.pid"


def _command(run_dir: RunDir, name: str) -> list[str]:
    return [sys.executable, "-m", "psrl.supervisor.node", str(run_dir.path), name]


def _wait_all(processes: Iterable[subprocess.Popen[bytes]], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def _start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot, "" if it is gone: tells a reused pid from the old process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
