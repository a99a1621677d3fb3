#!/bin/bash
# Checks everything, then submits the run as one heterogeneous job. More KEY=VALUE may follow; a later one wins.
#
#   ./launch.sh hydra.launcher.dry_run=true     print the job, submit nothing
#   ./launch.sh run_dir=RUN_DIR                 the directory of a run again: goes on
set -euo pipefail
here=$(dirname "$(realpath "$0")")
source "$here/overrides.sh"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"  # mini_swe is imported by every role: a directory that all nodes see

cluster=(  # Edit: these two partitions, and an account if yours wants one.
  hydra.launcher.trainer.partition=train
  hydra.launcher.rollout.partition=rollout
  # hydra.launcher.account=lab
  hydra.launcher.time=1-00:00:00
  hydra.launcher.signal_delay_s=300
  'hydra.launcher.sbatch=["--exclusive","--mem=0"]'
)

exec "${PSRL_PYTHON:-python}" -m psrl.launch -m hydra/launcher=submitit_slurm "${cluster[@]}" "${overrides[@]}" "$@"
