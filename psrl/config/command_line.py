"""A command line's KEY=VALUE pairs as Hydra shall see them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from psrl.config.compose import normalise
from psrl.config.errors import ConfigError

ON_SLURM = "hydra/launcher=submitit_slurm"


def prepare_overrides(argv: Sequence[str]) -> list[str]:
    """Presets chosen, old spellings replaced; tells of both. Raises ConfigError for an option."""
    bad = next((a for a in argv if a.startswith("-")), None)
    if bad is not None:
        raise ConfigError(f"Unknown option {bad}: give KEY=VALUE pairs, --help, --cfg job or -m.")
    overrides, notices = normalise(argv, has_accelerator=_has_accelerator(), on_slurm=ON_SLURM in argv)
    for notice in notices:
        print(f"psrl: {notice}", file=sys.stderr)
    return overrides


def _has_accelerator() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))
