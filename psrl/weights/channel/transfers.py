"""How the bytes of one version come into a reader's arrival buffer, each trainer rank's by the route that was granted.

Out of device memory they are read straight into the buffer, a segment of this host is copied from, and what lies in another
host's memory is fetched into the node's store, once for all instances, and copied from there. The ranks go on side by side,
in windows; between two of them deadline and cancellation are looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from psrl.weights.channel.mapped_reads import MappedRead, MappedReads
from psrl.weights.channel.nixl_agent import TransferError
from psrl.weights.channel.nixl_reads import NixlRead, NixlReads
from psrl.weights.channel.slot_header import HEADER_BYTES, SlotHeader, read_header, write_header
from psrl.weights.channel.tree import Tree
from psrl.weights.channel.wanted import Wanted
from psrl.weights.checksum import checksum
from psrl.weights.node_store import NodeStore
from psrl.weights.route import HOST, VRAM
from psrl.weights.staging import Staging

POLL_S = 0.0002
SPIN_S = 0.005
"""For so long after it has begun a read of device memory is looked at without a pause: many are over by then."""
WINDOW_BYTES = {HOST: 64 * 2**20, VRAM: 4 * 2**30}
"""A read of host memory may run inside the call that posts it; one between GPUs is over in milliseconds."""
SEGMENT_WINDOW_BYTES = 256 * 2**20


class Transfers:
    """Everything that reads of one puller need to keep between two pulls. `window_bytes` null: as fits the memory. `tree`: by
    which the first version comes."""

    def __init__(self, staging: Staging, store: NodeStore, window_bytes: int | None, tree: Tree | None = None) -> None:
        self._staging, self._store, self._window_bytes, self._tree = staging, store, window_bytes, tree
        self._segments = MappedReads(staging.device)
        self._nixl: dict[str, NixlReads] = {}
        self.on_progress: Callable[[int], None] | None = None

    @property
    def hanging(self) -> int:
        """Given-up reads whose memory may still be written to."""
        return sum(reads.hanging for reads in self._nixl.values())

    def free_stuck(self) -> None:
        for reads in self._nixl.values():
            reads.free_stuck()

    def map_segments(self, wanted: Sequence[Wanted]) -> None:
        """SegmentError if one of them cannot be mapped."""
        for want in wanted:
            if want.grant.shared is not None:
                self._segments.slot(want.rank, want.grant.shared, want.grant.nbytes)

    def run(self, wanted: Sequence[Wanted], check_time: Callable[[str], None]) -> list[SlotHeader | None]:
        """Everything of all ranks into the staging buffer; returns the headers, read last or believed. TransferError, or what `check_time`
        raises (it is told what is being waited for)."""
        if any(want.by_store for want in wanted):
            self._fetch(wanted, check_time)
        reads = [self._begin(want, len(wanted)) for want in wanted]
        self._advance(reads, VRAM, self._staging.replace, check_time)
        return [read.header for read in reads]

    def close(self) -> None:
        if self._tree is not None:
            self._tree.close()
        for reads in self._nixl.values():
            reads.close()
        self._segments.close()
        self._store.close()

    def _begin(self, want: Wanted, num_ranks: int) -> MappedRead | NixlRead:
        rank, into = want.rank, self._staging.buffer
        sections = self._staging.plan.reads[rank]
        if want.grant.route == "shm" or want.by_store:
            slot = (
                self._store.slot(want.header.version, rank)
                if want.grant.shared is None
                else self._segments.slot(rank, want.grant.shared, want.grant.nbytes)
            )
            return MappedRead(slot, sections, into, self._window_bytes or SEGMENT_WINDOW_BYTES)
        nixl = self._landing(VRAM, into, num_ranks)
        moves = [(read.source, into[read.target :][: read.nbytes]) for read in sections]
        return nixl.begin(want.source, want.grant, rank, moves, believed=want.header)

    def _fetch(self, wanted: Sequence[Wanted], check_time: Callable[[str], None]) -> None:
        """Have the version of all ranks on other hosts in the node's store: it is there by now, or is fetched here."""
        try:
            self._bring(wanted, check_time)
        except TransferError as error:
            if self._tree is None or not self._tree.turn_to_trainers(str(error)):
                raise
            self._bring(wanted, check_time)

    def _bring(self, wanted: Sequence[Wanted], check_time: Callable[[str], None]) -> None:
        sizes = [want.grant.nbytes for want in wanted]
        with self._store.alone(sizes, lambda: check_time("another instance of this node fetches the weights")):
            held = [(want, self._store.slot(want.header.version, want.rank)) for want in wanted if want.by_store]
            missing = [(want, slot) for want, slot in held if read_header(slot) != want.header]
            if missing:
                self._read_into(missing, check_time)
            if self._tree is not None:
                self._tree.arrived(self._store.segment, [(slot, want.header) for want, slot in held])

    def _read_into(self, missing: Sequence[tuple[Wanted, torch.Tensor]], check_time: Callable[[str], None]) -> None:
        """Fetch these into their slots of the store, which this process has locked."""

        def alive(cause: str) -> None:
            self._store.moved()
            check_time(cause)

        wanted, slots = [want for want, _ in missing], [slot for _, slot in missing]
        found = wanted if self._tree is None else self._tree.sources(wanted, self._store.segment, slots, alive)
        for slot in slots:
            slot[:HEADER_BYTES].zero_()
        nixl = self._landing(HOST, self._store.segment, max(want.rank for want in wanted) + 1)
        reads = [
            nixl.begin(there.source, there.grant, there.rank, [(0, slot[HEADER_BYTES:])])
            for there, slot in zip(found, slots, strict=True)
        ]
        self._advance(reads, HOST, self._store.leave, check_time, self._tree.worth_waiting if self._tree else None)
        for want, there, slot, read in zip(wanted, found, slots, reads, strict=True):
            if read.header != want.header:
                raise TransferError(
                    f"{there.source.name} overwrote version {want.header.version} while it was being read"
                )
            sections = want.source.learn(want.grant).sections
            if tuple(checksum(slot[HEADER_BYTES + start :][:size]) for start, size in sections) != want.grant.checksums:
                raise TransferError(f"what arrived from {there.source.name} has a wrong checksum")
            write_header(slot, want.header)

    def _landing(self, memory: str, buffer: torch.Tensor, num_ranks: int) -> NixlReads:
        if memory not in self._nixl:
            self._nixl[memory] = NixlReads(self._window_bytes or WINDOW_BYTES[memory])
        self._nixl[memory].land_in(buffer, num_ranks)
        return self._nixl[memory]

    def _advance(
        self,
        reads: Sequence[MappedRead | NixlRead],
        memory: str,
        lost: Callable[[], object],
        check_time: Callable[[str], None],
        worth_waiting: Callable[[float], bool] | None = None,
    ) -> None:
        """Until all are done. TransferError if it is not `worth_waiting` any more, which is told when something arrived last. If they
        are given up, the buffer in `memory` that reads may still write into is `lost`."""
        running, arrived, begun_s = [read for read in reads if not read.done], 0, time.monotonic()
        heard_s = begun_s
        try:
            while running:
                before = arrived
                for read in running:
                    arrived += read.advance()
                if arrived > before:
                    heard_s = time.monotonic()
                    self._tell(memory, arrived)
                running = [read for read in running if not read.done]
                if running and worth_waiting is not None and not worth_waiting(heard_s):
                    raise TransferError(f"only {arrived} bytes have arrived in time")
                if running:
                    check_time(f"weights stopped arriving after {arrived} bytes")
                if running and arrived == before:
                    spins = memory == VRAM and time.monotonic() - begun_s < SPIN_S
                    time.sleep(0.0 if spins else POLL_S)
        finally:
            under_way = [read.transfer for read in reads if isinstance(read, NixlRead) and read.transfer is not None]
            if under_way and self._nixl[memory].abandon(under_way):
                lost()

    def _tell(self, memory: str, arrived: int) -> None:
        if memory == HOST:
            self._store.moved()
        if self.on_progress is not None:
            self.on_progress(arrived)
