"""The local launcher: the same roles, messages and run directory as on a cluster, as processes of this host."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from psrl.config.checks import check_resume
from psrl.config.errors import ConfigError
from psrl.config.flat import flatten
from psrl.config.schema import Config
from psrl.outcome import COMPLETED, FAILED, INTERRUPTED, Outcome, archive_outcome, publish_outcome, read_outcome
from psrl.role import load_config
from psrl.rundir.keys import create_keys
from psrl.rundir.layout import RunDir
from psrl.rundir.snapshot import snapshot_code
from psrl.supervisor.node import role_environment
from psrl.supervisor.process import become_subreaper, describe_exit, spawn, terminate
from psrl.telemetry.metrics import MetricsTail, read_metrics, surviving
from psrl.telemetry.progress import Progress

EXIT_CODES = {COMPLETED: 0, FAILED: 1, INTERRUPTED: 130}
GROUPS = ("trainer", "rollout")
END_GRACE_S = 30.0
"""After the drain's own time the supervisors have this long to end their roles."""


def run_locally(config: Config) -> int:
    """Lay out (or resume) the run directory, start both supervisors, show progress, write summary and report."""
    run_dir = RunDir(choose_run_dir(config))
    previous = read_outcome(run_dir) if run_dir.config.exists() else None
    if run_dir.config.exists():
        refuse_running(run_dir)
        check_resume(flatten(_plain(load_config(run_dir))), flatten(_plain(config)))
        if previous is not None and previous.status == COMPLETED and not _wants_more(config, previous):
            print(
                f"psrl: {run_dir.path} is completed (version {previous.version}); ask for more with trainer.total_training_steps=N"
            )
            return 0
    fresh = not run_dir.path.exists()
    with claimed(run_dir):
        lay_out(run_dir, config)
        prepare = [sys.executable, "-m", "psrl.prepare", str(run_dir.path), "--parent", str(os.getpid())]
        prepared = subprocess.run(prepare, env=role_environment(run_dir))
        if prepared.returncode != 0:
            if fresh:  # a run that was refused leaves nothing behind
                shutil.rmtree(run_dir.path)
            return prepared.returncode if prepared.returncode > 0 else 1
        return start(run_dir, config, resuming=previous is not None or bool(read_metrics(run_dir.metrics)))


def start(run_dir: RunDir, config: Config, resuming: bool) -> int:
    """All that comes after the checks: the roles, the verdict, the report. Returns the exit code."""
    print(f"psrl: {'resuming' if resuming else 'starting'} in {run_dir.path}", flush=True)
    archive_outcome(run_dir)
    outcome = watch(run_dir, config)
    write_summary_and_report(run_dir)
    conclude(run_dir, outcome)
    return EXIT_CODES[outcome.status]


def choose_run_dir(config: Config) -> Path:
    """What `run_dir` names, else a fresh safe name under runs/."""
    if config.run_dir:
        return Path(config.run_dir).expanduser().resolve()
    words = re.sub(
        r"[^a-z0-9]+",
        "-",
        f"{config.model.name}-{config.data.reasoning_gym.dataset or config.data.task or 'data'}".lower(),
    ).strip("-")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs", f"{stamp}-{words}-{secrets.token_hex(2)}").resolve()


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


def lay_out(run_dir: RunDir, config: Config) -> None:
    """Everything that roles need to meet: keys, code, the configuration, the run's identity."""
    create_keys(run_dir)
    snapshot_code(run_dir)
    config.run_dir = str(run_dir.path)
    temporary = run_dir.config.with_suffix(".new")
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    temporary.rename(run_dir.config)
    if not run_dir.run.exists():
        identity = {"run_id": secrets.token_hex(4), "created": datetime.now(UTC).isoformat(timespec="seconds")}
        run_dir.run.write_text(json.dumps(identity, indent=1))


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
    attempt = f"{len(list(run_dir.ledger.iterdir()))}-{secrets.token_hex(3)}"
    env = role_environment(run_dir) | {"PSRL_LOCAL": "1", "PSRL_ATTEMPT": attempt, "PSRL_NODE": "local"}
    seen: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _frame: seen.append(n))
    supervisors = {
        group: spawn(_command(run_dir, group), env=env, log_path=run_dir.logs / f"supervisor-{group}.log")
        for group in GROUPS
    }
    tail, progress = MetricsTail(run_dir.metrics), Progress(config.trainer.total_training_steps, sys.stdout)
    for row in surviving(tail.poll())[-1:]:
        progress.update(row)
    asked, deadline = 0, float("inf")
    try:
        while (outcome := read_outcome(run_dir)) is None:
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
                    process.send_signal(signal.SIGTERM)
            dead = next((g for g, p in supervisors.items() if p.poll() is not None), None)
            if dead is not None and read_outcome(run_dir) is None:
                cause = f"the {dead} supervisor ended by {describe_exit(supervisors[dead].returncode)}"
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
    verdict = read_outcome(run_dir)
    assert verdict is not None  # published above at the latest
    return verdict


def write_summary_and_report(run_dir: RunDir) -> None:
    """summary.json and the page; a failure here is told and changes no verdict."""
    from psrl.report import write_report

    try:
        write_report(run_dir)
    except Exception as error:  # the run itself is over: its verdict must not depend on a plot
        print(
            f"psrl: the report could not be made ({type(error).__name__}: {error}); try python -m psrl.report {run_dir.path}",
            file=sys.stderr,
        )


def conclude(run_dir: RunDir, outcome: Outcome) -> None:
    """The last words on the terminal."""
    if run_dir.summary.exists():
        summary: dict[str, Any] = json.loads(run_dir.summary.read_text())
        figures = {
            k: summary.get(k)
            for k in ("steps", "reward_first", "reward_last", "max_staleness", "tokens_per_s", "transport")
        }
        print("psrl: " + "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()))
    print(f"psrl: {outcome.status}{': ' + outcome.cause if outcome.cause else ''}")
    if outcome.status == FAILED:
        for line in last_errors(run_dir):
            print(f"  {line}")
        print(
            f"psrl: logs are in {run_dir.logs}; the same command with run_dir={run_dir.path} goes on from the last checkpoint"
        )
    elif outcome.status == INTERRUPTED:
        print(f"psrl: go on with the same command and run_dir={run_dir.path}")
    if (run_dir.report / "index.html").exists():
        print(f"psrl: report: {run_dir.report / 'index.html'}")


def last_errors(run_dir: RunDir, limit: int = 6) -> list[str]:
    """The last line of each log that holds an error."""
    found = []
    for log in sorted(run_dir.logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        wrong = [line for line in lines[-200:] if " ERROR " in line or re.match(r"\w*(Error|Exception)\b", line)]
        if wrong:
            found.append(f"{log.stem}: {wrong[-1][:300]}")
    return found[:limit]


def _launcher_mark(run_dir: RunDir) -> Path:
    """Pid and start time of the launcher that holds the run directory."""
    return run_dir.rendezvous / "launcher.pid"


def _command(run_dir: RunDir, group: str) -> list[str]:
    return [sys.executable, "-m", "psrl.supervisor.node", str(run_dir.path), f"supervisor-{group}", "--group", group]


def _wait_all(processes: Any, grace_s: float) -> None:
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


def _wants_more(config: Config, previous: Outcome) -> bool:
    return config.trainer.total_training_steps is not None and config.trainer.total_training_steps > previous.version


def _plain(config: Config) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(config))
