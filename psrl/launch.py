"""The front door: `python -m psrl.launch [KEY=VALUE ...]` composes, checks, lays out the run directory, starts the roles."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from psrl.config.checks import check
from psrl.config.command_line import ON_SLURM, prepare_overrides
from psrl.config.compose import compose_config, conf_dir, register_schema, sweep_members
from psrl.config.errors import ConfigError
from psrl.config.help import add_section, render_help
from psrl.setup_run import sweep_entry

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
HYDRA_FLAGS = ("-m", "--multirun", "--info", "--hydra-help", "--shell-completion", "-sc")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 completed, 1 failed, 2 refused before anything started, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "-h" in argv or "--help" in argv:
        register_launchers()
        sys.stdout.write(render_help() + "\n")
        return 0
    try:
        if any(flag in argv for flag in HYDRA_FLAGS):
            return _with_hydra(argv)
        show = _take_cfg_flag(argv)
        if any(a.startswith("hydra/launcher=") for a in argv):
            raise ConfigError(
                "hydra/launcher starts the members of a sweep: add -m (a sweep may have a single member)."
            )
        overrides = prepare_overrides(argv)
        config = compose_config(overrides)
        if show:
            print(OmegaConf.to_yaml(config), end="")
            return 0
        return run_here(config)
    except ConfigError as error:
        print(f"psrl: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:  # before a role was started; later the launcher drains the run
        print("psrl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def run_here(config: DictConfig, sweep: Mapping[str, Any] | None = None) -> int:
    """Check the configuration, then run all roles as processes of this host."""
    from psrl.local import run_locally

    typed = OmegaConf.to_object(config)
    for warning in check(typed):  # type: ignore[arg-type]
        print(f"psrl: warning: {warning}", file=sys.stderr)
    return run_locally(typed, sweep)  # type: ignore[arg-type]


def _with_hydra(argv: Sequence[str]) -> int:
    """Sweeps and Hydra's own options. Here members run one after the other, with a launcher as it does; all are checked
    before the first one starts. Each has its own run directory below `hydra.sweep.dir`."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    register_schema()
    register_launchers()
    codes: list[int] = []

    def member(config: DictConfig) -> int:
        job = HydraConfig.get()
        sweep = sweep_entry(job.sweep.dir, int(job.job.num), list(job.overrides.task))
        with open_dict(config):
            config.run_dir = config.run_dir or str(Path(job.sweep.dir, job.sweep.subdir))
        codes.append(run_here(config, sweep))
        return codes[-1]

    member.codes = codes  # type: ignore[attr-defined]  # a launcher adds its members' exit codes
    flags = [a for a in argv if a.startswith("-") or a in ("job", "hydra", "all")]
    overrides = prepare_overrides([a for a in argv if a not in flags])
    if "-m" in flags or "--multirun" in flags:
        check_sweep(overrides, every_member=ON_SLURM not in overrides)
    sys.argv = [sys.argv[0], *flags, *overrides]
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(member)()
    return max(codes, default=0)


def register_launchers() -> None:
    """Put our settings in the place of the stock `hydra/launcher=submitit_slurm`. Hydra's scan for plugins stores the
    stock ones, so it has to have happened before."""
    from hydra.core.plugins import Plugins

    from psrl.slurm.settings import SlurmConf

    Plugins.instance()
    ConfigStore.instance().store(group="hydra/launcher", name="submitit_slurm", node=SlurmConf)
    add_section("hydra.launcher.", SlurmConf)


def check_sweep(overrides: Sequence[str], *, every_member: bool) -> None:
    """Refuse a sweep with the same words as a single run. A launcher that checks its members itself needs only that the
    first one composes."""
    members = sweep_members(overrides)
    if len(members) > 1 and any(o.startswith("run_dir=") for o in members[0] if o in members[1]):
        raise ConfigError(
            "run_dir is one directory, but the sweep has several runs: give hydra.sweep.dir, below which each gets its own."
        )
    for member in members if every_member else members[:1]:
        config = compose_config(member)
        if every_member:
            check(OmegaConf.to_object(config))  # type: ignore[arg-type]


def _take_cfg_flag(argv: list[str]) -> bool:
    """Remove `--cfg job` (or `-c job`) from `argv`; True if it was there."""
    for flag in ("--cfg", "-c"):
        if flag in argv:
            at = argv.index(flag)
            if argv[at + 1 : at + 2] != ["job"]:
                raise ConfigError(f"{flag} {' '.join(argv[at + 1 : at + 2])} is refused: only {flag} job is there.")
            del argv[at : at + 2]
            return True
    return False


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)
