"""Which weight channel a run uses: `psrl.ps_mode`. Loads NIXL to see whether it is there, and no torch."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.rundir.layout import RunDir
from psrl.rundir.publish import publish, read_published

MODES = ("auto", "nixl", "filesystem")
_MODULES = ("nixl._api", "nixl_cu13._api")

log = logging.getLogger(__name__)


def load_nixl() -> ModuleType:
    """NIXL's Python interface. Raises ImportError that says what each of its names failed with."""
    if sys.platform != "linux":
        raise ImportError(f"nixl runs on Linux only, this is {sys.platform}")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    faults = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            faults.append(str(error))
    raise ImportError("; ".join(faults))


def nixl_available() -> str | None:
    """None if NIXL can be loaded here, else the reason in a few words."""
    try:
        load_nixl()
    except ImportError as error:
        return str(error)
    return None


def choose_mode(ps_mode: str, missing: str | None) -> str:
    """ "nixl" or "filesystem" for `psrl.ps_mode`; `missing` is why NIXL cannot be loaded here, None if it can.

    ValueError for an unknown mode, RuntimeError if NIXL was asked for by name and cannot be had.
    """
    if ps_mode not in MODES:
        raise ValueError(f"psrl.ps_mode={ps_mode}: unknown weight channel, use one of {', '.join(MODES)}")
    if ps_mode == "nixl" and missing is not None:
        raise RuntimeError(
            f"psrl.ps_mode=nixl: nixl cannot be loaded here ({missing}); install nixl-cu13==1.5.1 or set "
            "psrl.ps_mode=filesystem"
        )
    if ps_mode == "auto" and missing is not None:
        log.warning("weights go through the run directory, which is slower: nixl cannot be loaded here (%s)", missing)
    return "filesystem" if ps_mode == "filesystem" or missing is not None else "nixl"


def settle_mode(config: Config, run_dir: RunDir) -> str:
    """Decide once for the whole run, so that no two roles decide differently. Raises ConfigError if the channel that was
    asked for by name cannot be had."""
    note = _note(run_dir)
    if not note.exists():
        missing = None if config.psrl.ps_mode == "filesystem" else nixl_available()
        try:
            mode = choose_mode(config.psrl.ps_mode, missing)
        except RuntimeError as error:
            raise ConfigError(f"{error}.") from error
        if config.psrl.broadcast_init and mode == "filesystem":
            log.warning("psrl.broadcast_init does nothing: every instance reads the weights from files")
        publish(note, mode.encode())
    return settled_mode(run_dir)


def settled_mode(run_dir: RunDir) -> str:
    """What `settle_mode` decided."""
    return read_published(_note(run_dir)).decode()


def _note(run_dir: RunDir) -> Path:
    return run_dir.data / "weight_channel"
