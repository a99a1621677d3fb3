"""A reader's side of the memory channel: ask every trainer rank, read what was granted, believe none of it unchecked.

The publisher says by which route (`weights.route`); whatever it is, header and checksums decide whether what has come is whole.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from psrl.net.waiting import wait
from psrl.protocol.weights import Location, ReadGranted
from psrl.rundir.keys import load_keys
from psrl.rundir.layout import RunDir
from psrl.rundir.node_local import node_store_path
from psrl.weights.broadcast import TRAINERS
from psrl.weights.channel.base import PullError, StagedWeights
from psrl.weights.channel.mapped_reads import SegmentError
from psrl.weights.channel.nixl_agent import TransferError, prepare_environment
from psrl.weights.channel.nixl_source import Source
from psrl.weights.channel.slot_header import HEADER_BYTES, SlotHeader
from psrl.weights.channel.transfers import Transfers
from psrl.weights.channel.tree import Tree
from psrl.weights.channel.wanted import Wanted
from psrl.weights.checksum import fold
from psrl.weights.location import locate
from psrl.weights.node_store import NodeStore
from psrl.weights.plan import Place, Specs, same_place
from psrl.weights.staging import Staging

MOST_STUCK = 2
"""Reads that hang at a silent publisher and keep a buffer each; with more no further pull is begun."""

log = logging.getLogger(__name__)


class NixlPuller:
    """See WeightPuller. `device`: of the arrival buffer, best that of the engine's weights. `address` is this host's address
    of the network that weights travel on; `route` as in `weights.route`; `window_bytes` null: as fits the route. `fanout`: nodes that
    read the first version from one source (`weights.broadcast`), 0 if all read from the trainers.
    """

    def __init__(
        self,
        run_dir: RunDir,
        expected: Specs,
        place: Place = same_place,
        *,
        device: torch.device | str = "cpu",
        address: str = "127.0.0.1",
        route: str = "auto",
        window_bytes: int | None = None,
        fanout: int = 0,
    ) -> None:
        self._over_nixl = prepare_environment(address)
        self.transport = f"by route {route}"
        self._run_dir, self._keys = run_dir, load_keys(run_dir)
        self._staging = Staging(expected, place, device)
        on_gpu = self._staging.device.type == "cuda"
        self._location, self._route = locate(self._staging.device), route
        store = NodeStore(node_store_path(run_dir.path), registered=on_gpu)
        self._tree = Tree(run_dir, self._keys, address, self._location, fanout) if fanout else None
        self._transfers = Transfers(self._staging, store, window_bytes, self._tree)
        self._sources: list[Source] = []
        self._cancelled = threading.Event()
        self._stream = torch.cuda.Stream(self._staging.device) if on_gpu else None

    @property
    def on_progress(self) -> Callable[[int], None] | None:
        return self._transfers.on_progress

    @on_progress.setter
    def on_progress(self, told: Callable[[int], None] | None) -> None:
        self._transfers.on_progress = told

    def pull(self, version: int, incarnation: int, deadline_s: float) -> StagedWeights:
        whole = False
        with self._on_device():
            self._staging.discard()
            self._free_stuck()
            if self._tree is not None:
                self._tree.begin(version, incarnation, deadline_s)
            try:
                wanted = self._meet(version, incarnation, deadline_s)
                begun_s = time.monotonic()
                headers = self._transfers.run(wanted, lambda cause: self._check_time(deadline_s, cause))
                transfer_s = time.monotonic() - begun_s
                self._verify(wanted, headers)
                whole = True
            except (TransferError, OSError) as error:
                raise PullError(f"transfer of version {version} failed: {error}") from error
            finally:
                if self._tree is not None and not whole:
                    self._tree.failed(f"version {version} did not arrive here")
                for source in self._sources:
                    source.close(keep=whole)
        staged = self._staging.hand_out(version, incarnation, self.transport)
        staged.transfer_s = transfer_s
        return staged

    @property
    def source(self) -> int:
        """Number of the node that has passed the latest version on to this one, or TRAINERS."""
        return TRAINERS if self._tree is None else self._tree.source

    @property
    def hanging(self) -> int:
        """Given-up reads whose memory may still be written to."""
        return self._transfers.hanging

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self._staging.discard()
        for source in self._sources:
            source.close()
        self._transfers.close()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """On a GPU everything here runs on a stream of its own, beside the engine's."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._staging.device)
        with torch.cuda.stream(self._stream):
            yield

    def _free_stuck(self) -> None:
        self._transfers.free_stuck()
        if self.hanging >= MOST_STUCK:
            raise PullError(f"{self.hanging} earlier reads still hang at a trainer rank that does not answer")

    # ---- asking ----------------------------------------------------------------------------------------------

    def _meet(self, version: int, incarnation: int, deadline_s: float) -> list[Wanted]:
        """What all ranks have granted, and all that is needed to read it."""
        try:
            return self._grants(version, incarnation, deadline_s, self._route)
        except SegmentError as error:
            if self._route != "auto":
                raise PullError(f"psrl.weights.route={self._route}: {error}; use auto or nixl") from error
            log.warning("weights come by nixl, which is slower on one host: %s", error)
            return self._grants(version, incarnation, deadline_s, "nixl")

    def _grants(self, version: int, incarnation: int, deadline_s: float, route: str) -> list[Wanted]:
        """Ask rank 0, learn from it how many ranks there are, ask the others; plan for their layouts."""
        # What goes along the tree goes through host memory: a device holds only what its own engine needs.
        by_tree = self._tree is not None and self._tree.taking_part
        location = Location(self._location.host) if by_tree else self._location
        question = version, incarnation, deadline_s, location, route
        grants = self._ask(self._sources[:1] or [self._source(0)], *question)
        num_ranks = self._sources[0].learn(grants[0]).num_ranks
        for source in self._sources[num_ranks:]:
            source.close()
        del self._sources[num_ranks:]
        grants += self._ask([self._source(rank) for rank in range(1, num_ranks)], *question)
        wanted = [
            Wanted(source.rank, source, grant, SlotHeader(
                version=version, incarnation=incarnation, sequence=grant.sequence, checksum=fold(grant.checksums)
            ))
            for source, grant in zip(self._sources, grants, strict=True)
        ]  # fmt: skip
        self._transfers.map_segments(wanted)
        self._plan(wanted)
        return wanted

    def _source(self, rank: int) -> Source:
        if rank == len(self._sources):
            self._sources.append(Source(self._run_dir, self._keys, rank))
        return self._sources[rank]

    def _ask(
        self,
        sources: Sequence[Source],
        version: int,
        incarnation: int,
        deadline_s: float,
        location: Location,
        route: str,
    ) -> list[ReadGranted]:
        for source in sources:
            source.open(version, incarnation, deadline_s, location, route)
        grants: dict[int, ReadGranted] = {}
        while waiting := [source for source in sources if source.rank not in grants]:
            for source in waiting:
                if (grant := source.poll()) is not None:
                    grants[source.rank] = grant
            self._check_time(deadline_s, "trainer ranks did not answer")
            if len(grants) < len(sources):
                wait([source.client for source in waiting], 0.05)
        return [grants[source.rank] for source in sources]

    def _plan(self, wanted: Sequence[Wanted]) -> None:
        """Plan for the ranks' layouts, have memory for them, say by which routes they come."""
        layouts = [want.source.learn(want.grant) for want in wanted]
        for layout, want in zip(layouts, wanted, strict=True):
            if want.grant.nbytes != HEADER_BYTES + layout.nbytes:
                raise PullError(
                    f"trainer rank {layout.rank} offers {want.grant.nbytes} bytes, its layout has {layout.nbytes}"
                )
        self._staging.prepare(layouts)
        if self._stream is not None:
            self._stream.synchronize()  # fresh memory has been cleared before anything arrives in it
        told = "; ".join(dict.fromkeys(self._transport_of(want.grant) for want in wanted))
        if told != self.transport:
            self.transport = told
            log.info("weights of %d trainer ranks come by %s", len(wanted), told)

    def _transport_of(self, grant: ReadGranted) -> str:
        if grant.route == "nixl":
            return self._over_nixl
        return f"{grant.route} ({'nixl, ' if grant.route == 'vram' else ''}{grant.why})"

    # ---- judging ---------------------------------------------------------------------------------------------

    def _verify(self, wanted: Sequence[Wanted], headers: Sequence[SlotHeader | None]) -> None:
        for rank, (want, header) in enumerate(zip(wanted, headers, strict=True)):
            version = want.header.version
            if header != want.header:
                raise PullError(f"trainer rank {rank} overwrote version {version} while it was being read")
            if not self._staging.intact(rank, want.grant.checksums):
                raise PullError(
                    f"what arrived of version {version} from trainer rank {rank} has a wrong checksum: it was overwritten, or damaged"
                )

    def _check_time(self, deadline_s: float, cause: str) -> None:
        if self._cancelled.is_set():
            raise PullError("the pull was cancelled")
        if time.monotonic() >= deadline_s:
            raise PullError(f"deadline passed: {cause}")
