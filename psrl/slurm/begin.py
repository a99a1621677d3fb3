"""`python -m psrl.slurm.begin RUN_DIR [KEY=VALUE ...]`: for hand-written batch scripts, before srun. Composes and checks the
configuration and lays out RUN_DIR, or finds that it goes on. Sizes that no override names are those of the job."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config, normalise
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.deployment import shares_of
from psrl.outcome import begin_attempt
from psrl.rundir.layout import RunDir
from psrl.setup_run import already_completed, completed_before, lay_out
from psrl.slurm.environment import node_counts
from psrl.supervisor.process import die_with_parent

EXIT_REFUSED = 2


def begin(run_dir: RunDir, overrides: Sequence[str], environ: Mapping[str, str]) -> None:
    """Afterwards `outcome.json` is there only if the run is completed already. Raises ConfigError with one sentence."""
    normal, notices = normalise(overrides, has_accelerator=False, on_slurm=True)
    sizes = node_counts(environ)
    given = {key: value for key, _, value in (o.lstrip("+").partition("=") for o in overrides)}
    asked = given.get("psrl.deployment.n_validate_instances", "0")
    validators = int(asked) if asked.isdigit() else 0  # anything else is refused below
    derived = [f"{key}={value}" for key, value in deployment_of(sizes, environ, validators).items() if key not in given]
    config = cast(Config, OmegaConf.to_object(compose_config([*normal, *derived, f"run_dir='{run_dir.path}'"])))
    for line in (*notices, *(f"warning: {w}" for w in check(config))):
        print(f"psrl: {line}", file=sys.stderr)
    shares_of(config.psrl.deployment, sizes)
    if done := completed_before(run_dir, config):
        print(already_completed(run_dir, done))
        return
    run_dir.create()
    lay_out(run_dir, config)
    begin_attempt(run_dir)


def deployment_of(sizes: tuple[int, ...], environ: Mapping[str, str], validators: int = 0) -> dict[str, int]:
    """psrl.deployment keys that use all of a job's nodes: a rank for each GPU of a trainer node (one on a CPU), and as
    many instances of one GPU on each rollout node, `validators` of them for validation.

    >>> deployment_of((1, 2), {})
    {'psrl.deployment.train_nnodes': 1, 'psrl.deployment.train_ngpus_per_node': 1, \
'psrl.deployment.rollout_ngpus_per_node': 1, 'psrl.deployment.n_rollout_instances': 2}
    """
    if len(sizes) == 2:
        (train, rollout), gpus = sizes, [_gpus(environ, f"_HET_GROUP_{n}") for n in (0, 1)]
    elif sizes == (1,):
        train, rollout = 1, 1
        gpus = [max(1, _gpus(environ, "") // 2)] * 2
    else:
        train, rollout = 1, sizes[0] - 1
        gpus = [_gpus(environ, "")] * 2
    return {
        "psrl.deployment.train_nnodes": train,
        "psrl.deployment.train_ngpus_per_node": gpus[0],
        "psrl.deployment.rollout_ngpus_per_node": gpus[1],
        "psrl.deployment.n_rollout_instances": max(1, rollout * gpus[1] - validators),
    }


def _gpus(environ: Mapping[str, str], suffix: str) -> int:
    """GPUs a node as the job asked for them ("h100:8" too), 1 if it asked for none."""
    asked = environ.get(f"SLURM_GPUS_PER_NODE{suffix}", "1")
    return int(asked.rpartition(":")[2])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m psrl.slurm.begin", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    die_with_parent(os.getppid())
    os.umask(0o077)
    try:
        begin(RunDir(args.run_dir.resolve()), args.overrides, os.environ)
        return 0
    except (ConfigError, OSError) as error:
        print(f"psrl: {error}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
