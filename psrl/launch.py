"""The front door: `python -m psrl.launch [KEY=VALUE ...]` composes, checks, lays out the run directory, starts the roles."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config, conf_dir, normalise, register_schema
from psrl.config.errors import ConfigError
from psrl.config.help import render_help

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
HYDRA_FLAGS = ("-m", "--multirun", "--info", "--hydra-help", "--shell-completion", "-sc")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 completed, 1 failed, 2 refused before anything started, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(render_help() + "\n")
        return 0
    try:
        if any(flag in argv for flag in HYDRA_FLAGS):
            return _with_hydra(argv)
        show = _take_cfg_flag(argv)
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


def prepare_overrides(argv: Sequence[str]) -> list[str]:
    """Overrides as Hydra shall see them; tells what was chosen or respelled."""
    bad = next((a for a in argv if a.startswith("-")), None)
    if bad is not None:
        raise ConfigError(f"Unknown option {bad}: give KEY=VALUE pairs, --help, --cfg job or -m.")
    overrides, notices = normalise(argv, has_accelerator=_has_accelerator(), on_slurm=False)
    for notice in notices:
        print(f"psrl: {notice}", file=sys.stderr)
    return overrides


def run_here(config: DictConfig) -> int:
    """Check the configuration, then run all roles as processes of this host."""
    from psrl.local import run_locally

    typed = OmegaConf.to_object(config)
    for warning in check(typed):  # type: ignore[arg-type]
        print(f"psrl: warning: {warning}", file=sys.stderr)
    return run_locally(typed)  # type: ignore[arg-type]


def _with_hydra(argv: Sequence[str]) -> int:
    """Sweeps and Hydra's own options. Every member runs with its own fresh run directory, one after the other."""
    import hydra

    register_schema()
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def member(config: DictConfig) -> int:
        codes.append(run_here(config))
        return codes[-1]

    flags = [a for a in argv if a.startswith("-") or a in ("job", "hydra", "all")]
    overrides = prepare_overrides([a for a in argv if a not in flags])
    sys.argv = [sys.argv[0], *flags, *overrides]
    member()
    return max(codes, default=0)


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


def _has_accelerator() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)
