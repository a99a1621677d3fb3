"""The batch script of a run as text. Pure: everything that it depends on is an argument."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from psrl.slurm.time_limit import format_time_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component of the job: `nodes` nodes with one task, the supervisor, on each."""

    nodes: int
    cpus_per_task: int
    time_s: int | None
    partition: str | None = None
    gpus_per_node: int | None = None
    mem_gb: int | None = None
    directives: tuple[str, ...] = ()
    """More, each as behind `#SBATCH `."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run as a job: two components are trainers and rollouts, a single one is both."""

    name: str
    run_dir: Path
    components: tuple[Component, ...]
    python: str
    signal_delay_s: int
    max_requeues: int
    after: str | None = None
    """Leader's id of the job that must have ended before this one starts."""
    setup: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    stderr_to_stdout: bool = True


READ_VERDICT = """\
# Exit codes that pass through srun are not to be relied on: the verdict is in the run directory.
field() { sed -n 's/^ *"'"$1"'": "\\(.*\\)",\\{0,1\\}$/\\1/p' "$run_dir/outcome.json" 2>/dev/null; }
verdict() { if [ "$(field attempt)" = "$PSRL_ATTEMPT" ]; then field status; else echo none; fi; }
"""
"""What every batch script has before srun, which it starts in the background."""
END = """\
step=$!
late=0  # srun waits for ever for a node that was lost and is back at once: after the verdict it has two minutes
while kill -0 "$step" 2>/dev/null && [ "$late" -lt 120 ]; do
  sleep 1
  if [ "$(verdict)" != none ]; then late=$((late + 1)); fi
done
kill -KILL "$step" 2>/dev/null

case $(verdict) in
completed)
  exit 0 ;;
interrupted)
  if [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_requeues" ]; then
    echo "psrl: requeueing job $SLURM_JOB_ID, which goes on in $run_dir"
    scontrol requeue "$SLURM_JOB_ID" && sleep 300  # ended by the requeue
  fi
  echo "psrl: not requeued after ${SLURM_RESTART_COUNT:-0} of at most $max_requeues times; submit it again to go on" ;;
none)
  echo "psrl: the job step ended without a verdict: a supervisor was killed; submit it again to go on" ;;
esac
exit 1
"""
"""What every batch script ends with. Only the batch script requeues: a requeue kills its caller, and containers seldom
have scontrol."""


def job_text(job: Job) -> str:
    """What sbatch reads."""
    lines = ["#!/bin/bash"]
    for number, component in enumerate(job.components):
        lines += ["#SBATCH hetjob"] if number else _job_directives(job)
        lines += _component_directives(component)
    lines += [
        "",
        f"run_dir={shlex.quote(str(job.run_dir))}",
        f"max_requeues={job.max_requeues}",
        f"export PSRL_SIGNAL_DELAY_S={job.signal_delay_s}",
        'export PSRL_ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        'export PYTHONSAFEPATH=1 PYTHONPATH="$run_dir/code${PYTHONPATH:+:$PYTHONPATH}"',
    ]
    lines += ["", "# setup", *job.setup] if job.setup else []
    return "\n".join([*lines, "", READ_VERDICT, _srun(job) + " &", END])


def _job_directives(job: Job) -> list[str]:
    directives = [
        f"--job-name={shlex.quote(job.name)}",
        f"--output={_file_pattern(job.run_dir)}.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=USR2@{job.signal_delay_s}",
    ]
    if not job.stderr_to_stdout:
        directives.insert(2, f"--error={_file_pattern(job.run_dir)}.err")
    if job.after is not None:
        directives.append(f"--dependency=afterany:{job.after}")
    return [f"#SBATCH {directive}" for directive in directives]


def _file_pattern(run_dir: Path) -> str:
    return shlex.quote(str(run_dir).replace("%", "%%") + "/logs/slurm-%j")


def _component_directives(component: Component) -> list[str]:
    directives = [f"--nodes={component.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={component.cpus_per_task}"]
    if component.partition is not None:
        directives.append(f"--partition={shlex.quote(component.partition)}")
    directives.append(f"--time={'UNLIMITED' if component.time_s is None else format_time_limit(component.time_s)}")
    if component.gpus_per_node is not None:
        directives.append(f"--gpus-per-node={component.gpus_per_node}")
    if component.mem_gb is not None:
        directives.append(f"--mem={component.mem_gb}G")
    return [f"#SBATCH {directive}" for directive in (*directives, *component.directives)]


def _srun(job: Job) -> str:
    """One step over all components. Every flag is explicit: sites change the defaults."""
    command = f'{job.python} -m psrl.slurm.role "$run_dir"'
    parts = []
    for number, component in enumerate(job.components):
        flags = [f"--het-group={number}"] if len(job.components) > 1 else []
        flags += [f"--nodes={component.nodes}", f"--ntasks={component.nodes}", "--ntasks-per-node=1"]
        flags += [f"--cpus-per-task={component.cpus_per_task}", "--cpu-bind=none"]
        flags += [] if component.gpus_per_node is None else [f"--gpus-per-node={component.gpus_per_node}"]
        parts.append(" ".join([*flags, *map(shlex.quote, job.srun_args), command]))
    return "srun --kill-on-bad-exit=1 --wait=0 " + " \\\n  : ".join(parts)
