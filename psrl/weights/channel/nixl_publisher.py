"""A trainer rank's side of the NIXL channel: two slots in its memory, read by any number of instances at once.

Training goes on while instances read: a thread of its own answers them and makes progress for them. Without readers it
sleeps. It never touches the payload; `publish` alone does, on the trainer's thread.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable

import torch

from psrl.net.server import Server
from psrl.net.waiting import Wakeup, wait
from psrl.protocol.weights import CloseRead, OpenRead, ReadGranted, ReadRefused, ShardLayout, ToPublisher
from psrl.rundir.endpoints import Endpoint, publish_next_endpoint
from psrl.rundir.keys import load_keys
from psrl.rundir.layout import RunDir
from psrl.trainer.backends.base import WeightShard
from psrl.weights.channel.base import Publication
from psrl.weights.channel.nixl_agent import TransferAgent, prepare_environment
from psrl.weights.channel.slot_header import HEADER_BYTES, SlotHeader, write_header
from psrl.weights.memory import flat_buffer
from psrl.weights.pack import lay_out, pack
from psrl.weights.store import Slot, SlotTable, VersionNotHeldError

PROGRESS_S = 0.0003
"""Pause between two rounds of progress while somebody reads; a socket transport stalls if it is much longer."""
LONGEST_LEASE_S = 600.0
CLOSE_GRACE_S = 2.0

log = logging.getLogger(__name__)


def endpoint_name(rank: int) -> str:
    """The role name under which trainer rank `rank` publishes where its weights are asked for."""
    return f"weights-{rank}"


class NixlPublisher:
    """See WeightPublisher. `address` is what the control socket binds to. Before a slot is overwritten its readers have
    `reader_grace_s` to finish, then it is taken from them (they notice and pull again). `peers`: instances to expect.
    """

    def __init__(
        self,
        run_dir: RunDir,
        rank: int,
        num_ranks: int,
        dtype: torch.dtype | None = None,
        *,
        address: str = "127.0.0.1",
        reader_grace_s: float = 5.0,
        peers: int = 64,
    ) -> None:
        self.transport = prepare_environment(address)
        self._run_dir, self._rank, self._num_ranks, self._dtype = run_dir, rank, num_ranks, dtype
        self._address, self._reader_grace_s, self._peers = address, reader_grace_s, peers
        self._table = SlotTable()
        self._changed = threading.Condition()  # guards the table, and tells when a reader has left
        self._slots: tuple[torch.Tensor, ...] = ()
        self._layout: ShardLayout | None = None
        self._metadata = b""
        self._advertised = -1
        self._agent: TransferAgent | None = None
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._wakeup = Wakeup()
        self._stopping = False
        self._failure: Exception | None = None
        self.peak_readers = 0
        """Most instances that read at the same moment so far."""

    def serve(self) -> None:
        self._agent = TransferAgent(f"weights-{self._rank}-{secrets.token_hex(6)}")
        keys, name = load_keys(self._run_dir), endpoint_name(self._rank)
        self._server = Server(keys, self._address, ToPublisher, name=name, peers=self._peers)
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, incarnation: int, shards: Iterable[WeightShard]) -> Publication:
        given = list(shards)
        if self._layout is None:
            self._allocate(lay_out(given, self._rank, self._num_ranks, self._dtype))
        assert self._layout is not None
        begun_s = time.monotonic()
        with self._changed:
            self._check_serving()
            self._changed.wait_for(lambda: not self._table.target().readers, self._reader_grace_s)
            slot, revoked = self._table.begin_write(version, incarnation)
            self._put_header(slot)
        waited_s = time.monotonic() - begun_s
        if revoked:
            log.warning("the slot for version %d was taken from %d slow readers", version, len(revoked))
        try:
            found = pack(given, self._layout, self._slots[slot.index][HEADER_BYTES:])
        except Exception:
            with self._changed:
                self._table.abandon_write(slot)
                self._put_header(slot)
            raise
        with self._changed:
            self._table.finish_write(slot, found)
            self._put_header(slot)
        if self._advertised != incarnation:
            self._advertise(incarnation)
        return Publication(self._layout.nbytes, time.monotonic() - begun_s - waited_s, waited_s, revoked)

    def close(self) -> None:
        if self._thread is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._table.num_readers() == 0, CLOSE_GRACE_S)
            self._stopping = True
            self._wakeup.set()
            self._thread.join()
            self._thread = None
        if self._server is not None:
            self._server.close(0.0)
            self._server = None
        if self._agent is not None and self._table.num_readers():
            self._agent.outlive_process(self._slots)
        self._agent = None

    # ---- the trainer's thread --------------------------------------------------------------------------------

    def _allocate(self, layout: ShardLayout) -> None:
        if self._agent is None:
            raise RuntimeError("publish() was called before serve()")
        slots = tuple(flat_buffer(HEADER_BYTES + layout.nbytes) for _ in self._table.slots)
        for slot in slots:
            self._agent.register(slot)
        self._metadata = self._agent.metadata()
        self._slots, self._layout = slots, layout

    def _put_header(self, slot: Slot) -> None:
        header = SlotHeader(
            version=slot.version, incarnation=slot.incarnation, sequence=slot.sequence, checksum=slot.checksum
        )
        write_header(self._slots[slot.index], header)

    def _advertise(self, incarnation: int) -> None:
        assert self._server is not None
        here = Endpoint(address=self._server.endpoint, node=socket.gethostname(), pid=os.getpid())
        publish_next_endpoint(self._run_dir, endpoint_name(self._rank), here)
        self._advertised = incarnation

    def _check_serving(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError(
                f"weights of rank {self._rank} are not served: {self._failure or 'serve() was not called'}"
            )

    # ---- the serving thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except Exception as error:  # told to the trainer at its next publish
            self._failure = error
            log.exception("serving weights failed")

    def _round(self) -> None:
        assert self._server is not None and self._agent is not None
        reading = self._table.num_readers() > 0
        if reading:
            self._agent.progress()
            time.sleep(PROGRESS_S)
        else:
            wait([self._server, self._wakeup], 60.0)
            self._wakeup.clear()
        for peer, message in self._server.poll(0.0):
            if isinstance(message, OpenRead):
                self._server.send(peer, self._open(peer, message))
            elif isinstance(message, CloseRead):
                self._leave(peer.hex())
        for peer in self._server.lost_peers():
            self._leave(peer.hex())
        if reading:
            self._expire()

    def _open(self, peer: bytes, request: OpenRead) -> ReadGranted | ReadRefused:
        lease_s = min(max(request.lease_s, 0.0), LONGEST_LEASE_S)
        with self._changed:
            try:
                slot = self._table.open(request.version, request.incarnation, peer.hex(), time.monotonic() + lease_s)
            except VersionNotHeldError as error:
                return ReadRefused(read=request.read, cause=str(error))
            self.peak_readers = max(self.peak_readers, self._table.num_readers())
            sequence, checksum = slot.sequence, slot.checksum
        assert self._agent is not None
        memory = self._slots[slot.index]
        known = request.known_agent == self._agent.name
        return ReadGranted(
            read=request.read,
            agent=self._agent.name,
            address=memory.data_ptr(),
            nbytes=memory.nbytes,
            device=0,
            sequence=sequence,
            checksum=checksum,
            metadata=b"" if known else self._metadata,
            layout=None if known else self._layout,
        )

    def _leave(self, reader: str) -> None:
        with self._changed:
            self._table.close(reader)
            self._changed.notify_all()

    def _expire(self) -> None:
        with self._changed:
            gone = self._table.expire(time.monotonic())
            if gone:
                self._changed.notify_all()
        for reader in gone:
            log.warning("reader %s did not finish within its lease", bytes.fromhex(reader).decode(errors="replace"))
