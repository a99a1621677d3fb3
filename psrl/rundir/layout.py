"""Where everything of one run lies. The run directory is the only thing that roles must share to meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SUBDIRECTORIES = (
    "report", "logs", "rendezvous", "ledger", "samples", "checkpoints", "weights", "data", "timeline", "code",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths below one run directory; nothing is read or written until `create` is called."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, as it was composed and checked."""
        return self.path / "config.yaml"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def outcome(self) -> Path:
        """The verdict of the last attempt; exit codes that pass through a scheduler are not to be relied on."""
        return self.path / "outcome.json"

    @property
    def run(self) -> Path:
        """The run's identity: made once, the same after every requeue."""
        return self.path / "run.json"

    @property
    def validation(self) -> Path:
        """Metrics of each validated version, one JSON line each."""
        return self.path / "validation.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def rendezvous(self) -> Path:
        """Endpoints and keys: immutable names, never replaced."""
        return self.path / "rendezvous"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def samples(self) -> Path:
        """Sealed sample segments."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Published versions of the filesystem weight channel."""
        return self.path / "weights"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline"

    @property
    def code(self) -> Path:
        """Snapshot of the package that started the run; a requeue runs this."""
        return self.path / "code"

    def create(self) -> None:
        """Make the run directory and its parts, each 0700 whatever the umask is. Doing it again is harmless.

        A directory of this user that others may enter is closed to them (its setgid bit, which carries a project's
        quota on many clusters, stays). Raises PermissionError if one belongs to somebody else.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self.path, *(self.path / name for name in SUBDIRECTORIES)):
            make_private(directory)


def make_private(directory: Path) -> None:
    """Make `directory` (its parent exists) or close it to others; it must be a real directory of this user."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    fault = ownership_fault(directory)
    if fault:
        raise PermissionError(f"{directory} {fault}: choose another directory")
    mode = directory.stat().st_mode
    if mode & 0o077:
        directory.chmod(mode & 0o7700)


def ownership_fault(directory: Path) -> str | None:
    """Why `directory` must not be used ("is not a directory", "belongs to user 1234, ..."), or None."""
    status = directory.stat()
    if not directory.is_dir():
        return "is not a directory"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
    return None


def exposure_fault(path: Path) -> str | None:
    """Why `path` does not keep a secret: another owner, or permissions for group or others. None if it does."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"is accessible by others (mode {status.st_mode & 0o777:04o})"
    return None
