"""A trainer rank's side of the memory channel: two slots where its weights are, read by any number of instances at once.

Training goes on while instances read: a thread of its own answers them and chooses their way. Device memory is offered by
this process, host memory is mapped, or offered by a process of its own (`host_server`). Without readers the thread sleeps. It
never touches the slots' payload; `publish` alone does, on the trainer's thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable

import torch

from psrl.protocol.weights import Location, OpenRead, ReadGranted, ReadRefused, ShardLayout
from psrl.rundir.endpoints import publish_next_endpoint
from psrl.rundir.keys import load_keys
from psrl.rundir.layout import RunDir
from psrl.trainer.backends.base import WeightShard
from psrl.weights.channel.base import Publication
from psrl.weights.channel.host_server import HostServer, Offer
from psrl.weights.channel.nixl_agent import TransferAgent, TransferError, device_index, prepare_environment
from psrl.weights.channel.serving import Serving, lease_end_s
from psrl.weights.channel.slots import Mirror, Slots
from psrl.weights.location import locate
from psrl.weights.pack import lay_out, pack
from psrl.weights.route import HOST, RouteError, choose_route
from psrl.weights.split import Split
from psrl.weights.store import Slot, SlotState, SlotTable, VersionNotHeldError

CLOSE_GRACE_S = 2.0
_MAPPED = Offer("", b"", 0)
"""What is mapped needs no agent."""

log = logging.getLogger(__name__)


def endpoint_name(rank: int) -> str:
    """The role name under which trainer rank `rank` publishes where its weights are asked for."""
    return f"weights-{rank}"


class NixlPublisher:
    """See WeightPublisher. `address` is what the control socket binds to. Before a slot is overwritten its readers have
    `reader_grace_s` to finish, then it is taken from them (they notice and pull again). `peers`: instances to expect.
    `split`: the engines' tensor parallelism. `on_host`: versions are held in host memory even if the weights are on a GPU.
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
        split: Split | None = None,
        on_host: bool = False,
    ) -> None:
        self.transport = prepare_environment(address)
        self._split, self._on_host = split or Split(), on_host
        self._run_dir, self._rank, self._num_ranks, self._dtype = run_dir, rank, num_ranks, dtype
        self._address, self._reader_grace_s, self._peers = address, reader_grace_s, peers
        self._table = SlotTable()
        self._changed = threading.Condition()  # guards the table, and tells when a reader has left
        self._name = f"weights-{rank}-{secrets.token_hex(6)}"
        self._home: Slots | None = None
        self._mirror: Mirror | None = None
        self._location: Location | None = None
        self._layout: ShardLayout | None = None
        self._advertised = -1
        self._device_agent: tuple[TransferAgent, bytes] | None = None
        self._host_server: HostServer | None = None
        self._waiting: dict[str, OpenRead] = {}
        self._serving: Serving | None = None
        self.peak_readers = 0
        """Most instances that read at the same moment so far."""

    def serve(self) -> None:
        keys, name = load_keys(self._run_dir), endpoint_name(self._rank)
        self._serving = Serving(keys, self._address, self, name=name, peers=self._peers)
        self._serving.start()

    def publish(self, version: int, incarnation: int, shards: Iterable[WeightShard]) -> Publication:
        given = list(shards)
        if self._layout is None:
            self._allocate(given)
        assert self._layout is not None and self._home is not None
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
            found = pack(given, self._layout, self._home.payload(slot.index))
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
        if self._serving is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._table.num_readers() == 0, CLOSE_GRACE_S)
            self._serving.stop()
            self._serving = None
        homes = [slots for slots in (self._home, self._mirror.slots if self._mirror else None) if slots is not None]
        if self._host_server is not None:
            self._host_server.close()
        if self._device_agent is not None and self._table.num_readers():
            self._device_agent[0].outlive_process(slots.whole for slots in homes)
        self._device_agent = None
        for slots in homes:
            slots.close()

    # ---- the trainer's thread --------------------------------------------------------------------------------

    def _allocate(self, shards: list[WeightShard]) -> None:
        self._check_serving()
        layout = lay_out(shards, self._rank, self._num_ranks, self._dtype, self._split)
        weights = shards[0].local.device if shards else torch.device("cpu")
        device = torch.device("cpu") if self._on_host else weights
        self._location = locate(device)
        self._home, self._layout = Slots(layout.nbytes, device, registered=device != weights), layout

    def _put_header(self, slot: Slot) -> None:
        assert self._home is not None
        self._home.put_header(slot)
        if self._mirror is not None and slot.state is SlotState.WRITING:
            self._mirror.slots.put_header(slot)  # who still reads the copy of the version before shall notice

    def _advertise(self, incarnation: int) -> None:
        assert self._serving is not None
        publish_next_endpoint(self._run_dir, endpoint_name(self._rank), self._serving.endpoint())
        self._advertised = incarnation

    def _check_serving(self) -> None:
        if self._serving is None or not self._serving.alive:
            cause = "serve() was not called" if self._serving is None else self._serving.failure
            raise RuntimeError(f"weights of rank {self._rank} are not served: {cause}")

    # ---- the serving thread: see Holder ----------------------------------------------------------------------

    def num_readers(self) -> int:
        return self._table.num_readers()

    def progress(self) -> bool:
        if self._device_agent is not None:
            self._device_agent[0].progress()
        return self._device_agent is not None

    @property
    def server_pid(self) -> int | None:
        """The process that offers host memory to other hosts; None if nobody has asked for that yet."""
        return None if self._host_server is None else self._host_server.pid

    def late(self) -> Iterable[tuple[str, ReadGranted | ReadRefused]]:
        waiting, self._waiting = self._waiting, {}
        try:
            if waiting and self._host_server is not None:
                self._host_server.offer()
        except TransferError as error:  # one failure is the answer to all who have waited for it
            return [(reader, ReadRefused(read=each.read, cause=str(error))) for reader, each in waiting.items()]
        answers = [(reader, self.open(reader, request)) for reader, request in waiting.items()]
        return [(reader, answer) for reader, answer in answers if answer is not None]

    def open(self, reader: str, request: OpenRead) -> ReadGranted | ReadRefused | None:
        with self._changed:
            try:
                slot = self._table.open(request.version, request.incarnation, reader, lease_end_s(request))
            except VersionNotHeldError as error:
                return ReadRefused(read=request.read, cause=str(error))
            self.peak_readers = max(self.peak_readers, self._table.num_readers())
            sequence, checksums = slot.sequence, slot.checksums
        assert self._location is not None
        try:
            route = choose_route(self._location, request.location, request.route)
            slots = self._held_in(route.memory, slot, sequence)
            offer = _MAPPED if route.name == "shm" else self._offer(slots)
        except (RouteError, VersionNotHeldError, TransferError, OSError) as error:
            self.leave(reader)
            return ReadRefused(read=request.read, cause=str(error), final=isinstance(error, RouteError))
        if offer is None:
            self.leave(reader)
            self._waiting[reader] = request
            return None
        memory = slots.slot(slot.index)
        return ReadGranted(
            read=request.read,
            publisher=self._name,
            route=route.name,
            memory=route.memory,
            why=route.why,
            address=offer.address + memory.data_ptr() - slots.whole.data_ptr(),
            nbytes=memory.nbytes,
            device=device_index(memory),
            sequence=sequence,
            checksums=checksums,
            agent=offer.agent,
            metadata=b"" if request.known_agent == offer.agent else offer.metadata,
            layout=None if request.known_layout == self._name else self._layout,
            shared=slots.shared(slot.index) if route.name == "shm" else None,
        )

    def _held_in(self, memory: str, slot: Slot, sequence: int) -> Slots:
        """The slots in that kind of memory, this version in them. OSError if there is no room for a copy."""
        assert self._home is not None and self._layout is not None
        if memory == self._home.memory:
            return self._home
        if self._mirror is None:
            torch.cuda.set_device(self._home.device)
            self._mirror = Mirror(self._home, self._layout.nbytes)
        if not self._mirror.holds(slot):
            self._mirror.fill(slot)
            with self._changed:
                if slot.sequence != sequence:
                    raise VersionNotHeldError("the version was overwritten while it was copied to host memory")
                self._mirror.settle(slot)
        return self._mirror.slots

    def _offer(self, slots: Slots) -> Offer | None:
        """How readers reach this memory; None if they can soon, then `late` is asked again."""
        if slots.memory == HOST:
            return self._offer_of_host(slots)
        if self._device_agent is None:
            torch.cuda.set_device(slots.device)
            agent = TransferAgent(f"{self._name}-{slots.memory}")
            agent.register(slots.whole)
            self._device_agent = agent, agent.metadata()
        agent, metadata = self._device_agent
        return Offer(agent.name, metadata, slots.whole.data_ptr())

    def _offer_of_host(self, slots: Slots) -> Offer | None:
        assert self._serving is not None
        if self._host_server is None:
            segment = slots.shared(0)
            assert segment is not None
            self._host_server = HostServer(f"{self._name}-{HOST}", segment, self._serving.wake)
        offer = self._host_server.offer()
        self._host_server.serve(reading=offer is not None)
        return offer

    def leave(self, reader: str) -> None:
        self._waiting.pop(reader, None)
        with self._changed:
            self._table.close(reader)
            self._changed.notify_all()
        self._rest()

    def _rest(self) -> None:
        if self._host_server is not None and self._table.num_readers() == 0:
            self._host_server.serve(reading=False)

    def expire(self) -> None:
        with self._changed:
            gone = self._table.expire(time.monotonic())
            if gone:
                self._changed.notify_all()
        for reader in gone:
            log.warning("reader %s did not finish within its lease", bytes.fromhex(reader).decode(errors="replace"))
        if gone:
            self._rest()
