"""A process's side of taking turns. The coordinator says whose turn it is (psrl.coordinator.turns); the locks make sure of it.

With `psrl.colocate` False both sides are `shared` False: they have their GPUs for ever and every call does nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from psrl.colocate.gpu_lock import GpuLock, own_gpus, turn_directory
from psrl.gpus import visible_gpus

if TYPE_CHECKING:
    from psrl.colocate.memory import Memory
    from psrl.role import Role

T = TypeVar("T")


class TrainerTurn:
    """One trainer rank's: from its start on it has the GPU, between `leave` and `enter` it has not. Both may be repeated."""

    def __init__(self, lock: GpuLock | None, memory: Memory | None, limit_s: float) -> None:
        self.shared = lock is not None
        self._lock, self._memory, self._limit_s = lock, memory, limit_s
        if self._lock is not None:
            self._lock.acquire(limit_s)

    def region(self) -> AbstractContextManager[None]:
        """Allocate inside what is to be released between turns."""
        return nullcontext() if self._memory is None else self._memory.region()

    def leave(self) -> None:
        if self._lock is not None and self._memory is not None and self._lock.held:
            self._memory.pause()
            self._lock.release()

    def enter(self) -> None:
        """Wait for the GPU and take it. TurnError if it does not become free in time."""
        if self._lock is not None and self._memory is not None and not self._lock.held:
            self._lock.acquire(self._limit_s)
            self._memory.resume()


class InstanceTurn:
    """An instance's, which must go on listening while it waits: `ask`, then `entered` again and again. Starts asleep."""

    def __init__(self, lock: GpuLock | None, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.shared = lock is not None
        self.asleep = self.shared
        self.waiting = False
        """It was told to wake and has no GPU yet."""
        self._lock, self._limit_s, self._clock = lock, limit_s, clock
        self._asked_s = 0.0

    def build(self, make: Callable[[], T], sleep: Callable[[T], None]) -> T:
        """Make something that needs the GPU, at a moment when nobody has it, and put it to sleep. TurnError if there is none."""
        if self._lock is None:
            return make()
        self._lock.acquire(self._limit_s)
        made = make()
        sleep(made)
        self._lock.release()
        return made

    def ask(self) -> None:
        if self.asleep and not self.waiting:
            self.waiting, self._asked_s = True, self._clock()

    def entered(self) -> bool:
        """True once, when the GPU is there. TurnError if that takes too long."""
        if not self.waiting or self._lock is None:
            return False
        if self._lock.try_acquire():
            self.waiting = self.asleep = False
            return True
        if self._clock() - self._asked_s >= self._limit_s:
            raise self._lock.overdue(self._limit_s)
        return False

    def leave(self) -> None:
        """The memory is released: give the GPU up, or stop asking for it."""
        self.asleep, self.waiting = self.shared, False
        if self._lock is not None:
            self._lock.release()


def trainer_turn(role: Role, memory: Callable[[], Memory]) -> TrainerTurn:
    """Of this rank; waits for its GPU."""
    limit_s = role.config.psrl.fault_tolerance.turn_timeout_s
    if not role.config.psrl.colocate:
        return TrainerTurn(None, None, limit_s)
    return TrainerTurn(_lock(role, int(os.environ["LOCAL_RANK"]), 1), memory(), limit_s)


def instance_turn(role: Role) -> InstanceTurn:
    """Of this instance; waits for nothing yet."""
    limit_s = role.config.psrl.fault_tolerance.turn_timeout_s
    if not role.config.psrl.colocate:
        return InstanceTurn(None, limit_s)
    each = role.config.psrl.deployment.rollout_ngpus_per_node_per_instance
    return InstanceTurn(_lock(role, int(role.name.rpartition("-")[2]), each), limit_s)


def _lock(role: Role, number: int, count: int) -> GpuLock:
    names = () if role.config.trainer.device == "cpu" else visible_gpus(os.environ)
    return GpuLock(turn_directory(), own_gpus(names, number * count, count), role.name)
