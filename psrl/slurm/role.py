"""`python -m psrl.slurm.role RUN_DIR`: the one task that a job has on each node. It finds out which node of the run this
is, prepares the run if it leads, and then is the node's supervisor."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from psrl.conclusion import conclude, write_summary_and_report
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.deployment import Share, shares_of
from psrl.gpus import visible_gpus
from psrl.outcome import FAILED, INTERRUPTED, Outcome, begin_attempt, current_attempt, current_outcome, publish_outcome
from psrl.role import load_config
from psrl.rundir.layout import RunDir
from psrl.rundir.publish import publish
from psrl.slurm.environment import NodePlace, place_from_environment
from psrl.supervisor.node import NodeSupervisor, become_supervisor, node_scratch, role_environment
from psrl.supervisor.specs import share_children

log = logging.getLogger("psrl.supervisor")

LOOK_S = 0.5
"""How often a node looks whether the leading node has prepared the run."""


def main() -> int:
    """Exit code 1 for a failed run on the leading node only: the first task that ends badly makes Slurm end the others,
    and the leading one still has to say what happened. The batch script goes by the verdict in the run directory."""
    parser = argparse.ArgumentParser(prog="python -m psrl.slurm.role", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = RunDir(parser.parse_args().run_dir.resolve())
    early = _note_signals()
    try:
        place = place_from_environment(os.environ)
        config = load_config(run_dir)
        share = share_of(config, place)
    except (ConfigError, OSError) as error:
        print(f"psrl: {error}", file=sys.stderr)
        publish_outcome(run_dir, Outcome(status=FAILED, cause=str(error)))
        return 1
    os.environ["PSRL_NODE"] = place.hostname
    become_supervisor(share.name, run_dir.logs / f"{share.name}.log")
    log.info("%s is task %d of job %s on %s", share.name, place.procid, place.job_id, place.hostname)
    try:
        return _lead(run_dir, config, share, place, early) if share.leads else _follow(run_dir, config, share, early)
    finally:
        shutil.rmtree(node_scratch(run_dir), ignore_errors=True)


def share_of(config: Config, place: NodePlace) -> Share:
    """What this node runs. Raises ConfigError if the job's nodes are not those of psrl.deployment."""
    sizes = tuple(group.ntasks for group in place.groups)
    if config.psrl.colocate and sizes != (1,):
        raise ConfigError(
            f"psrl.colocate=True needs trainer and rollout on one node, but the job has {sum(sizes)}: ask for a single one."
        )
    return shares_of(config.psrl.deployment, sizes)[place.group][place.index]


def _lead(run_dir: RunDir, config: Config, share: Share, place: NodePlace, early: list[int]) -> int:
    begin_attempt(run_dir)
    nodes = "; ".join(", ".join(group.nodes) for group in place.groups)
    again = f" (requeued {place.restart_count} times)" if place.restart_count else ""
    print(f"psrl: job {place.job_id}{again} on {nodes}\npsrl: run directory {run_dir.path}", flush=True)
    code = _prepared(run_dir) or _supervise(run_dir, share, config, early)
    outcome = current_outcome(run_dir)
    if outcome is not None:
        if outcome.status != INTERRUPTED:  # then the time that is left is short, and the run goes on
            write_summary_and_report(run_dir, page=config.trainer.report)
        conclude(run_dir, outcome, "a run goes on from its last checkpoint; a failed one when it is submitted again")
    return code


def _prepared(run_dir: RunDir) -> int:
    """Model, prompts and weight channel; doing it again after a requeue is cheap. 0, or 1 after telling the verdict."""
    prepare = [sys.executable, "-m", "psrl.prepare", str(run_dir.path), "--parent", str(os.getpid())]
    done = subprocess.run(prepare, env=role_environment(run_dir), stderr=subprocess.PIPE, text=True)
    log.info("preparation ended with %d\n%s", done.returncode, done.stderr)
    if done.returncode == 0:
        publish(_prepared_mark(run_dir), b"")
        return 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    publish_outcome(run_dir, Outcome(status=FAILED, cause=lines[-1].removeprefix("psrl: ") if lines else "preparation"))
    return 1


def _follow(run_dir: RunDir, config: Config, share: Share, early: list[int]) -> int:
    """Wait for the leading node's preparation; Slurm ends this task if that node dies."""
    limit_s = config.psrl.fault_tolerance.startup_timeout_s
    deadline = time.monotonic() + limit_s
    while not _prepared_mark(run_dir).exists():
        if (outcome := current_outcome(run_dir)) is not None:
            log.error("the run ended before it began: %s", outcome.cause)
            return 0
        if time.monotonic() > deadline:
            cause = (
                f"{share.name} waited psrl.fault_tolerance.startup_timeout_s={limit_s:g} s for the run's preparation"
            )
            publish_outcome(run_dir, Outcome(status=FAILED, cause=cause))
            return 1
        time.sleep(LOOK_S)
    _supervise(run_dir, share, config, early)
    return 0


def _supervise(run_dir: RunDir, share: Share, config: Config, early: list[int]) -> int:
    if early:  # the node is wanted back before anything began
        publish_outcome(run_dir, Outcome(status=INTERRUPTED, cause=f"{signal.Signals(early[0]).name} at {share.name}"))
        return 0
    specs = share_children(config, run_dir, share, visible_gpus(os.environ))
    return NodeSupervisor(run_dir, share.name, specs, early_signals=early, owner=os.getppid()).run()


def _prepared_mark(run_dir: RunDir) -> Path:
    return run_dir.rendezvous / f"prepared-{current_attempt()}"


def _note_signals() -> list[int]:
    """From the first line on a warning is kept, not fatal; the supervisor acts on it as soon as it runs."""
    seen: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda n, _frame: seen.append(n))
    return seen


if __name__ == "__main__":
    raise SystemExit(main())
