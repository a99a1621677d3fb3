"""The two slots of a publisher, in one kind of memory: a header, then the payload."""

from __future__ import annotations

import torch

from psrl.protocol.weights import SharedSlot
from psrl.weights.channel.slot_header import HEADER_BYTES, SlotHeader, write_header
from psrl.weights.checksum import fold
from psrl.weights.memory import PAGE, SharedMemory, flat_buffer
from psrl.weights.route import HOST, VRAM
from psrl.weights.store import Slot


class Slots:
    """On `device`: in its own memory if it is a GPU, else in a segment that readers on this host map. `registered`: with
    CUDA, for host slots that a GPU copies into."""

    def __init__(self, nbytes: int, device: torch.device, registered: bool = False) -> None:
        self.memory = HOST if device.type == "cpu" else VRAM
        self.device = device
        self.nbytes = HEADER_BYTES + nbytes
        self._stride = -(-self.nbytes // PAGE) * PAGE
        self._shared = SharedMemory(2 * self._stride, registered) if self.memory == HOST else None
        self.whole = flat_buffer(2 * self._stride, device) if self._shared is None else self._shared.buffer

    def slot(self, index: int) -> torch.Tensor:
        """Header and payload."""
        return self.whole[index * self._stride : index * self._stride + self.nbytes]

    def payload(self, index: int) -> torch.Tensor:
        return self.slot(index)[HEADER_BYTES:]

    def put_header(self, slot: Slot) -> None:
        header = SlotHeader(
            version=slot.version, incarnation=slot.incarnation, sequence=slot.sequence, checksum=fold(slot.checksums)
        )
        write_header(self.slot(slot.index), header)

    def shared(self, index: int) -> SharedSlot | None:
        """How another process maps the slot; None for device memory."""
        return None if self._shared is None else self._shared.slot(index * self._stride)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()


class Mirror:
    """A host copy of slots in device memory, for readers that cannot read these. A version is copied when somebody asks for
    it first, on a stream of its own: training does not wait for it."""

    def __init__(self, of: Slots, nbytes: int) -> None:
        self.slots = Slots(nbytes, torch.device("cpu"), registered=True)
        self._of = of
        self._sequences = [-1, -1]
        self._stream = torch.cuda.Stream(of.device)

    def holds(self, slot: Slot) -> bool:
        return self._sequences[slot.index] == slot.sequence

    def fill(self, slot: Slot) -> None:
        """Copy the payload, not the header. The caller makes sure afterwards that the slot is still the same, then `settle`s."""
        self._sequences[slot.index] = -1
        with torch.cuda.stream(self._stream):
            self.slots.payload(slot.index).copy_(self._of.payload(slot.index), non_blocking=True)
            self._stream.synchronize()

    def settle(self, slot: Slot) -> None:
        """What was copied is whole: let readers see it."""
        self.slots.put_header(slot)
        self._sequences[slot.index] = slot.sequence
