"""The code that a run started with, kept in its directory: a requeue hours later runs the same code."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from psrl.rundir.layout import RunDir
from psrl.rundir.publish import sync_directory

_SKIP = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "conf")


def snapshot_code(run_dir: RunDir, package: Path | None = None) -> Path:
    """Copy the running psrl package with its conf/ to `code/psrl`, once. Returns the directory for PYTHONPATH.

    A snapshot that exists is never touched. `package` is the package directory (default: the one that runs).
    """
    final = run_dir.code / "psrl"
    if final.is_dir():
        return run_dir.code
    package = package_dir() if package is None else package
    incoming = run_dir.code / f".incoming-{secrets.token_hex(6)}"
    try:
        shutil.copytree(package, incoming, ignore=_SKIP)
        shutil.copytree(conf_dir(package), incoming / "conf", ignore=shutil.ignore_patterns("__pycache__"))
        try:
            incoming.rename(final)  # one step: the snapshot is whole or not there
        except OSError:
            if not final.is_dir():  # otherwise somebody else was first, and theirs is as good
                raise
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    sync_directory(run_dir.code)
    return run_dir.code


def package_dir() -> Path:
    """The directory of the psrl package that this process runs."""
    return Path(__file__).resolve().parent.parent


def conf_dir(package: Path | None = None) -> Path:
    """The configuration directory: inside the package (wheel, snapshot) or beside it (a checkout).

    Raises FileNotFoundError naming both places.
    """
    package = package_dir() if package is None else package
    inside, beside = package / "conf", package.parent / "conf"
    if inside.is_dir():
        return inside
    if beside.is_dir() and (package.parent / "pyproject.toml").is_file():
        return beside
    raise FileNotFoundError(f"no configuration directory at {inside} or {beside}: the installation is incomplete")
