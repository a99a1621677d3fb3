"""Checkpoint directories `step_<N>`: what makes one complete, which one to resume from, which ones to delete.

A directory is complete when its marker is there and every file that the marker lists is there with its size (and, for
small files, its checksum). The marker is the very last file written. So a save that was killed is never resumed from,
and the next save of that step replaces it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MARKER = "complete.json"
CHECKSUM_LIMIT = 16 << 20
"""Files up to this size carry a crc32 in the marker; reading hundreds of GB back to check them would stall a resume."""

_STEP = re.compile(r"step_(0|[1-9][0-9]*)")


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return root / f"step_{step}"


def begin(root: Path, step: int, needed_bytes: int) -> Path:
    """Make an empty directory for `step` and return it. One process calls it; the others wait until it has returned.

    A half-written directory of the same step is replaced. Raises FileExistsError when a complete one is there, and
    OSError (ENOSPC), before anything is written, when the file system has less than `needed_bytes` free.
    """
    path = step_directory(root, step)
    if path.exists():
        if why_incomplete(path) is None:
            raise FileExistsError(f"{path} is a complete checkpoint already; it is not overwritten")
        logger.warning("replacing the half-written checkpoint %s", path)
        _remove(path)
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint needs {needed_bytes / 1e9:.2f} GB but only {free / 1e9:.2f} GB are free under {root}: free"
            " some space, lower trainer.keep_last, or choose another run_dir",
        )
    path.mkdir()
    return path


def finish(path: Path, metadata: Mapping[str, Any]) -> None:
    """Sync every file below `path`, then write the marker with their sizes and with `metadata` (JSON values), synced.

    Call it when every rank has written its files. Raises ValueError when there is none.
    """
    files = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        _sync(file)
        size = file.stat().st_size
        files[file.relative_to(path).as_posix()] = {"size": size, "crc32": _crc32(file, size)}
    if not files:
        raise ValueError(f"{path} holds no files: there is nothing to mark as complete")
    for directory in {path, *(p for p in path.rglob("*") if p.is_dir())}:
        _sync(directory)
    unnamed = path / f".{MARKER}.{os.getpid()}"
    unnamed.write_text(json.dumps({"files": files, "metadata": dict(metadata)}, indent=1))
    _sync(unnamed)
    unnamed.rename(path / MARKER)
    _sync(path)
    _sync(path.parent)


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata that `finish` stored in a complete checkpoint."""
    metadata: dict[str, Any] = json.loads((path / MARKER).read_text())["metadata"]
    return metadata


def why_incomplete(path: Path) -> str | None:
    """None if the checkpoint is complete, else what is wrong with it in a few words."""
    try:
        files = json.loads((path / MARKER).read_text())["files"]
        expected = [(path / name, int(entry["size"]), entry["crc32"]) for name, entry in files.items()]
    except FileNotFoundError:
        return f"no {MARKER}: its save did not finish"
    except NotADirectoryError:
        return "not a directory"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MARKER} is not readable"
    for file, size, checksum in expected:
        if not file.is_file():
            return f"{file.name} is missing"
        if file.stat().st_size != size:
            return f"{file.name} has {file.stat().st_size} bytes instead of {size}"
        if checksum is not None and _crc32(file, size) != checksum:
            return f"{file.name} has a wrong checksum"
    return None


def newest_complete(root: Path) -> tuple[Path | None, list[tuple[str, str]]]:
    """The complete checkpoint with the highest step, None if there is none, and what was passed over: (name, why).

    Steps are compared as numbers (step_9 < step_10). Everything named `step_...` that is newer than the result, or no
    checkpoint name at all, is passed over with a warning that names it; it is never an error.
    """
    candidates = [p for p in root.iterdir() if p.name.startswith("step_")] if root.is_dir() else []
    skipped = [(p.name, "not the name of a checkpoint") for p in sorted(candidates) if _step_of(p) is None]
    found = None
    for path in _newest_first(candidates):
        reason = why_incomplete(path)
        if reason is None:
            found = path
            break
        skipped.append((path.name, reason))
    for name, reason in skipped:
        logger.warning("checkpoint %s is skipped: %s", root / name, reason)
    return found, skipped


def prune(root: Path, keep_last: int) -> list[Path]:
    """Delete all but the newest `keep_last` complete checkpoints, and half-written ones older than those.

    Incomplete directories never count as kept ones, and one that is newer than a kept one may be a save in progress: it
    stays. Returns what was deleted.
    """
    if keep_last < 1:
        raise ValueError(f"trainer.keep_last is {keep_last}; it must be at least 1, or nothing could be resumed")
    if not root.is_dir():
        return []
    kept = 0
    removed = []
    for path in _newest_first(list(root.iterdir())):
        if kept == keep_last:
            _remove(path)
            removed.append(path)
        elif why_incomplete(path) is None:
            kept += 1
    return removed


def _step_of(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def _newest_first(paths: list[Path]) -> list[Path]:
    numbered = [(step, path) for path in paths if (step := _step_of(path)) is not None]
    return [path for _, path in sorted(numbered, reverse=True)]


def _remove(path: Path) -> None:
    """The marker goes first: a deletion that is interrupted leaves nothing that looks complete."""
    if path.is_dir():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink()


def _crc32(file: Path, size: int) -> int | None:
    return zlib.crc32(file.read_bytes()) if size <= CHECKSUM_LIMIT else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
