"""The staleness window as status pages and logs show it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from psrl.coordinator.staleness_state import StalenessState
from psrl.coordinator.window import latest_places


class BufferState(StrEnum):
    PENDING = "pending"
    """Room is left for reservations."""
    READY = "ready"
    """All groups of the step are there."""
    READY_WITH_CAPACITY = "ready_with_capacity"
    """Ready, and reservations that could have landed here are still open; it accepts nothing."""
    STUCK = "stuck"
    """Not ready, and every place is filled or promised."""


class BufferStatus(NamedTuple):
    """One buffer as a reader sees it, in groups: `reserved` of the open reservations are pictured in this buffer."""

    buffer: int
    state: BufferState
    reserved: int
    occupied: int
    taken: int


def window_status(state: StalenessState) -> list[BufferStatus]:
    """The open window, buffer by buffer; what trains now (all taken, not yet published) comes first. O(staleness)."""
    room, due = state.window()
    status = []
    if state.lo > state.version:
        status.append(BufferStatus(state.version, BufferState.READY, 0, 0, state.taken))
    for i, reserved in enumerate(latest_places(room, due)):
        buffer = state.lo + i
        filled, taken = state.filled(buffer), state.taken if buffer == state.version else 0
        if filled >= state.capacity(buffer):
            kind = BufferState.READY_WITH_CAPACITY if due[i] else BufferState.READY
        else:
            kind = BufferState.STUCK if reserved == room[i] else BufferState.PENDING
        status.append(BufferStatus(buffer, kind, reserved, filled - taken, taken))
    return status
