"""An instance's side of the NIXL channel: read every trainer rank's slot straight into the staging buffer.

Dim-0 rows are contiguous on both sides, so each shard is read into its final place and nothing is assembled afterwards.
A read is made in windows; between two of them deadline and cancellation are looked at.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from psrl.net.waiting import wait
from psrl.protocol.weights import ReadGranted
from psrl.rundir.keys import load_keys
from psrl.rundir.layout import RunDir
from psrl.weights.channel.base import PullError, StagedWeights
from psrl.weights.channel.nixl_agent import Read, TransferAgent, TransferError, prepare_environment
from psrl.weights.channel.nixl_source import Source
from psrl.weights.channel.slot_header import HEADER_BYTES, SlotHeader, read_header
from psrl.weights.plan import Place, Segment, Specs, same_place, windows
from psrl.weights.staging import Staging

POLL_S = 0.0002
MOST_STUCK = 2
"""Reads that hang at a silent publisher and keep a staging buffer each; with more no further pull is begun."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """What is still to be read from one rank; the last window is the slot's header."""

    rank: int
    moves: list[list[tuple[int, int, int]]]
    read: Read | None = None


@dataclass(slots=True)
class _Memory:
    """Registered memory that reads write into. It is let go of only when none of them is under way any more."""

    buffers: tuple[torch.Tensor, ...]
    registrations: list[Any]
    unfinished: list[Read] = field(default_factory=list)


class NixlPuller:
    """See WeightPuller. `address` is this host's address of the network that weights travel on."""

    def __init__(
        self,
        run_dir: RunDir,
        expected: Specs,
        place: Place = same_place,
        *,
        address: str = "127.0.0.1",
        window_bytes: int = 64 * 2**20,
    ) -> None:
        self.transport = prepare_environment(address)
        self.on_progress: Callable[[int], None] | None = None
        self._run_dir, self._keys = run_dir, load_keys(run_dir)
        self._window_bytes = window_bytes
        self._staging = Staging(expected, place)
        self._headers = torch.empty(0, dtype=torch.uint8)
        self._memory: _Memory | None = None
        self._stuck: list[_Memory] = []
        self._sources: list[Source] = []
        self._cancelled = threading.Event()
        self._agent = TransferAgent(f"weights-reader-{secrets.token_hex(6)}")

    def pull(self, version: int, incarnation: int, deadline_s: float) -> StagedWeights:
        self._staging.discard()
        self._free_stuck()
        if len(self._stuck) >= MOST_STUCK:
            raise PullError(f"{len(self._stuck)} earlier reads still hang at a trainer rank that does not answer")
        try:
            grants = self._open(version, incarnation, deadline_s)
            self._prepare(grants)
            self._read(grants, deadline_s)
            self._verify(grants, version, incarnation)
        except (TransferError, OSError) as error:
            raise PullError(f"transfer of version {version} failed: {error}") from error
        finally:
            for source in self._sources:
                source.close()
        return self._staging.hand_out(version, incarnation, self.transport)

    @property
    def hanging(self) -> int:
        """Given-up reads whose memory may still be written to."""
        return len(self._stuck)

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self._staging.discard()
        self._free_stuck()
        if self._stuck:
            self._agent.outlive_process(buffer for memory in self._stuck for buffer in memory.buffers)
            log.warning(
                "%d reads still hang at a trainer rank: their buffers stay until this process ends", len(self._stuck)
            )

    # ---- asking ----------------------------------------------------------------------------------------------

    def _open(self, version: int, incarnation: int, deadline_s: float) -> list[ReadGranted]:
        """Ask rank 0, learn from it how many ranks there are, ask the others; all grants in rank order."""
        grants = self._ask(self._sources[:1] or [self._source(0)], version, incarnation, deadline_s)
        layout = grants[0].layout or self._sources[0].layout
        assert layout is not None
        del self._sources[layout.num_ranks :]
        others = [self._source(rank) for rank in range(1, layout.num_ranks)]
        return grants + self._ask(others, version, incarnation, deadline_s)

    def _source(self, rank: int) -> Source:
        if rank == len(self._sources):
            self._sources.append(Source(self._run_dir, self._keys, rank))
        return self._sources[rank]

    def _ask(self, sources: Sequence[Source], version: int, incarnation: int, deadline_s: float) -> list[ReadGranted]:
        for source in sources:
            source.open(version, incarnation, deadline_s)
        grants: dict[int, ReadGranted] = {}
        while waiting := [source for source in sources if source.rank not in grants]:
            for source in waiting:
                if (grant := source.poll()) is not None:
                    grants[source.rank] = grant
            self._check_time(deadline_s, "trainer ranks did not answer")
            if len(grants) < len(sources):
                wait([source.client for source in waiting], 0.05)
        return [grants[source.rank] for source in sources]

    def _prepare(self, grants: Sequence[ReadGranted]) -> None:
        """Meet the agents that are new, plan for their layouts, have registered memory of the right size."""
        for source, grant in zip(self._sources, grants, strict=True):
            if grant.layout is not None:
                if source.met:
                    self._part(source)
                source.met, source.layout = self._agent.add_peer(grant.metadata), grant.layout
        layouts = [source.layout for source in self._sources if source.layout is not None]
        changed = self._staging.prepare(layouts)
        for layout, grant in zip(layouts, grants, strict=True):
            if grant.nbytes != HEADER_BYTES + layout.nbytes:
                raise PullError(
                    f"trainer rank {layout.rank} offers {grant.nbytes} bytes, its layout has {layout.nbytes}"
                )
        if changed or self._memory is None or self._headers.numel() != HEADER_BYTES * len(grants):
            self._release_memory()
            self._headers = torch.zeros(HEADER_BYTES * len(grants), dtype=torch.uint8)
            buffers = (self._staging.buffer, self._headers)
            self._memory = _Memory(buffers, [self._agent.register(buffer) for buffer in buffers if buffer.nbytes])

    # ---- reading ---------------------------------------------------------------------------------------------

    def _read(self, grants: Sequence[ReadGranted], deadline_s: float) -> None:
        """Read all ranks side by side, one window of each at a time."""
        self._headers.zero_()
        jobs = [self._job(rank, grant) for rank, grant in enumerate(grants)]
        arrived = 0
        try:
            while jobs:
                before = arrived
                for job in jobs:
                    arrived += self._advance(job, grants[job.rank])
                if self.on_progress is not None and arrived > before:
                    self.on_progress(arrived)
                jobs = [job for job in jobs if job.moves]
                if jobs:
                    self._check_time(deadline_s, f"weights stopped arriving after {arrived} bytes")
                if arrived == before:
                    time.sleep(POLL_S)
        finally:
            self._abandon([job.read for job in jobs if job.read is not None])

    def _job(self, rank: int, grant: ReadGranted) -> _Job:
        base, payload = self._staging.buffer.data_ptr(), grant.address + HEADER_BYTES

        def move(segment: Segment) -> tuple[int, int, int]:
            return base + segment.target, payload + segment.source, segment.nbytes

        cut = windows(self._staging.plan.segments[rank], self._window_bytes)
        header = (self._headers.data_ptr() + rank * HEADER_BYTES, grant.address, HEADER_BYTES)
        return _Job(rank, [*([move(segment) for segment in window] for window in cut), [header]])

    def _advance(self, job: _Job, grant: ReadGranted) -> int:
        """Post or follow the job's window; bytes that have arrived with it if it is done."""
        source = self._sources[job.rank]
        try:
            if job.read is None:
                job.read = self._agent.read(source.met, job.moves[0], grant.device)
            if not job.read.done():
                return 0
            job.read.end()
        except TransferError as error:
            job.read = None
            self._part(source)
            raise TransferError(f"trainer rank {job.rank}: {error}") from error
        job.read = None
        return sum(nbytes for _, _, nbytes in job.moves.pop(0))

    def _verify(self, grants: Sequence[ReadGranted], version: int, incarnation: int) -> None:
        for rank, grant in enumerate(grants):
            header = read_header(self._headers[rank * HEADER_BYTES :])
            wanted = SlotHeader(
                version=version, incarnation=incarnation, sequence=grant.sequence, checksum=grant.checksum
            )
            if header != wanted:
                raise PullError(f"trainer rank {rank} overwrote version {version} while it was being read")
            if self._staging.checksum(rank) != grant.checksum:
                raise PullError(f"what arrived of version {version} from trainer rank {rank} has a wrong checksum")

    def _check_time(self, deadline_s: float, cause: str) -> None:
        if self._cancelled.is_set():
            raise PullError("the pull was cancelled")
        if time.monotonic() >= deadline_s:
            raise PullError(f"deadline passed: {cause}")

    # ---- memory ----------------------------------------------------------------------------------------------

    def _part(self, source: Source) -> None:
        """Forget a publisher whose agent is gone."""
        if not self._stuck:  # a connection on which reads hang is left alone
            with contextlib.suppress(TransferError):  # it may have been dropped already
                self._agent.remove_peer(source.met)
        source.forget()

    def _abandon(self, unfinished: list[Read]) -> None:
        """Reads cannot be called back, their bytes may arrive at any time: leave them the memory and take another."""
        if unfinished and self._memory is not None:
            self._memory.unfinished = unfinished
            self._stuck.append(self._memory)
            self._memory = None
            self._staging.replace()

    def _free_stuck(self) -> None:
        for memory in self._stuck:
            memory.unfinished = [read for read in memory.unfinished if not self._over(read)]
            if not memory.unfinished:
                self._deregister(memory)
        self._stuck = [memory for memory in self._stuck if memory.unfinished]

    def _over(self, read: Read) -> bool:
        try:
            if not read.done():
                return False
        except TransferError:
            pass  # failed: nothing arrives any more
        with contextlib.suppress(TransferError):
            read.end()
        return True

    def _release_memory(self) -> None:
        if self._memory is not None:
            self._deregister(self._memory)
            self._memory = None

    def _deregister(self, memory: _Memory) -> None:
        for registration in memory.registrations:
            self._agent.deregister(registration)
