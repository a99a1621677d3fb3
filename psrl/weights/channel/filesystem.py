"""Weights through files in the run directory: slower than memory, but needs nothing except the shared filesystem.

Each rank writes `v<incarnation>-<version>-r<rank>.bin` and, last, the `.json` beside it: a version is whole when the
json of every rank stands there. Names are never reused. Nothing is fsynced: a version that a crash loses is published
again under a new incarnation, and readers trust the checksum, not the file.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch

from psrl.protocol.weights import ShardFile, ShardLayout
from psrl.rundir.layout import RunDir
from psrl.trainer.backends.base import WeightShard
from psrl.weights.channel.base import Publication, PullError, StagedWeights
from psrl.weights.memory import flat_buffer
from psrl.weights.pack import lay_out, pack
from psrl.weights.plan import Place, Specs, same_place
from psrl.weights.split import Split
from psrl.weights.staging import Staging

TRANSPORT = "filesystem"
_KEEP = 2
_NAME = re.compile(r"v(\d+)-(\d+)-r(\d+)\.(bin|json)")
_RETRY_S = 0.2

log = logging.getLogger(__name__)


def _path(directory: Path, version: int, incarnation: int, rank: int, suffix: str) -> Path:
    return directory / f"v{incarnation}-{version}-r{rank}.{suffix}"


def _held(directory: Path, rank: int, suffix: str) -> list[tuple[int, int]]:
    """(incarnation, version) of one rank's files, oldest first."""
    matches = [match for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), int(match[2])) for match in matches if int(match[3]) == rank and match[4] == suffix)


class FilesystemPublisher:
    """One trainer rank's side; see WeightPublisher."""

    def __init__(
        self, run_dir: RunDir, rank: int, num_ranks: int, dtype: torch.dtype | None = None, split: Split | None = None
    ) -> None:
        self.transport = TRANSPORT
        self._directory = run_dir.weights
        self._rank, self._num_ranks, self._dtype, self._split = rank, num_ranks, dtype, split
        self._layout: ShardLayout | None = None
        self._payload = torch.empty(0, dtype=torch.uint8)

    def serve(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def publish(self, version: int, incarnation: int, shards: Iterable[WeightShard]) -> Publication:
        begun_s = time.monotonic()
        held = _held(self._directory, self._rank, "json")
        if held and (incarnation, version) <= held[-1]:
            raise ValueError(
                f"version {version} of incarnation {incarnation} is not newer than the published version "
                f"{held[-1][1]} of incarnation {held[-1][0]}"
            )
        given = list(shards)
        if self._layout is None:
            self._layout = lay_out(given, self._rank, self._num_ranks, self._dtype, self._split)
            self._payload = flat_buffer(self._layout.nbytes)
        found = pack(given, self._layout, self._payload)
        with _path(self._directory, version, incarnation, self._rank, "bin").open("xb") as file:
            file.write(self._payload.numpy().data)
        marker = _path(self._directory, version, incarnation, self._rank, "json")
        text = msgspec.json.encode(
            ShardFile(version=version, incarnation=incarnation, checksums=found, layout=self._layout)
        )
        unseen = marker.with_suffix(".tmp")
        unseen.write_bytes(text)
        unseen.rename(marker)
        self._drop_old()
        return Publication(self._layout.nbytes, time.monotonic() - begun_s)

    def close(self) -> None:
        self._payload = torch.empty(0, dtype=torch.uint8)

    def _drop_old(self) -> None:
        # The marker goes first: no reader may find it beside a payload that is gone.
        keep = set(_held(self._directory, self._rank, "json")[-_KEEP:])
        for suffix in ("json", "bin"):
            for incarnation, version in _held(self._directory, self._rank, suffix):
                if (incarnation, version) not in keep:
                    _path(self._directory, version, incarnation, self._rank, suffix).unlink(missing_ok=True)


class FilesystemPuller:
    """An instance's side; see WeightPuller. A file that is not there yet, short or wrong is looked at again until the
    deadline: a shared filesystem may show names and lengths late."""

    def __init__(self, run_dir: RunDir, expected: Specs, place: Place = same_place) -> None:
        self.transport = TRANSPORT
        self.on_progress: Callable[[int], None] | None = None
        self._directory = run_dir.weights
        self._staging = Staging(expected, place)
        self._cancelled = threading.Event()

    def pull(self, version: int, incarnation: int, deadline_s: float) -> StagedWeights:
        self._staging.discard()
        while True:
            try:
                return self._attempt(version, incarnation)
            except (OSError, EOFError, msgspec.DecodeError) as error:
                cause = f"version {version} of incarnation {incarnation} cannot be read: {error}"
            left_s = deadline_s - time.monotonic()
            if self._gone(version, incarnation):
                raise PullError(f"version {version} of incarnation {incarnation} is not kept any more, newer ones are")
            if left_s <= 0 or self._cancelled.wait(min(_RETRY_S, left_s)):
                raise PullError(cause)

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self._staging.discard()

    def _attempt(self, version: int, incarnation: int) -> StagedWeights:
        first = self._marker(version, incarnation, 0)
        files = [first, *(self._marker(version, incarnation, rank) for rank in range(1, first.layout.num_ranks))]
        self._staging.prepare([file.layout for file in files])
        into = self._staging.buffer.numpy().data
        arrived = 0
        for rank, file in enumerate(files):
            path = _path(self._directory, version, incarnation, rank, "bin")
            with path.open("rb", buffering=0) as payload:
                for read in self._staging.plan.reads[rank]:
                    payload.seek(read.source)
                    arrived += _read_exactly(payload, into[read.target : read.target + read.nbytes], path)
                    if self.on_progress is not None:
                        self.on_progress(arrived)
            if not self._staging.intact(rank, file.checksums):
                raise EOFError(f"checksum of {path.name} is wrong")
        return self._staging.hand_out(version, incarnation, self.transport)

    def _marker(self, version: int, incarnation: int, rank: int) -> ShardFile:
        path = _path(self._directory, version, incarnation, rank, "json")
        return msgspec.json.decode(path.read_bytes(), type=ShardFile)

    def _gone(self, version: int, incarnation: int) -> bool:
        if not self._directory.is_dir():
            return False
        held = _held(self._directory, 0, "json")
        return len(held) >= _KEEP and (incarnation, version) < held[0]


def _read_exactly(payload, into: memoryview, path: Path) -> int:  # type: ignore[no-untyped-def]
    done = 0
    while done < len(into):
        count = payload.readinto(into[done:])
        if not count:
            raise EOFError(f"{path.name} is shorter than its layout says")
        done += count
    return done
