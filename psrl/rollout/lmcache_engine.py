"""An engine that decodes a moved sample once its keys and values are here, or have not come in time.

`kv_transfer.transfer_mode` sync and pin_sync: what an instance submits passes through here. A sample that comes from another
instance waits while the workers fetch its prefix from there; everything else goes straight on.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import torch

from psrl.protocol.generation import FINISH_ABORT, CacheEvents, EngineStats, GenerateRequest, SampleRequest, TokenChunk
from psrl.rollout.cache_identity import cache_identity
from psrl.rollout.engines.base import Engine, InWorkers
from psrl.rollout.engines.requests import last_chunk
from psrl.rollout.lmcache_messages import PullEnd, PullOrder
from psrl.rollout.lmcache_orders import WorkerOrders

log = logging.getLogger(__name__)


class EngineWithWorkers(Engine, Protocol):
    """An engine that decodes in processes of its own."""

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | InWorkers) -> None: ...

    def call_workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]: ...


@dataclass(slots=True)
class _Waiting:
    """A sample whose keys and values are on their way."""

    request: GenerateRequest
    sample: SampleRequest
    until_s: float


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """Samples that came from another instance, by how their transfer ended, and the tokens that were moved for them."""

    moved: int = 0
    nothing_there: int = 0
    """The source had no keys and values of this version, or they were here already."""
    gave_up: int = 0
    """Too slow, or failed: the prefix is computed, or what is missing of it."""
    moved_tokens: int = 0

    def after(self, end: PullEnd) -> TransferCounts:
        """With one more."""
        name = "gave_up" if end.cause else "moved" if end.moved else "nothing_there"
        return replace(self, **{name: getattr(self, name) + 1, "moved_tokens": self.moved_tokens + end.moved})


class TransferringEngine:
    """`engine` behind its own interface. `orders` reach its workers; `timeout_s` is the most that a sample waits."""

    def __init__(
        self,
        engine: EngineWithWorkers,
        orders: WorkerOrders,
        *,
        run: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._orders, self._run, self._timeout_s, self._clock = engine, orders, run, timeout_s, clock
        self.version, self.on_gpu = engine.version, engine.on_gpu
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count()
        self.counts = TransferCounts()

    # ---- samples ---------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        moved = [sample for sample in request.samples if sample.source]
        if len(moved) < len(request.samples):
            stay = tuple(sample for sample in request.samples if not sample.source)
            self._engine.submit(msgspec.structs.replace(request, samples=stay))
        tags = cache_identity(self._run, request.incarnation, self.version).kv_transfer_params
        for sample in moved:
            number = next(self._numbers)
            self._waiting[number] = _Waiting(request, sample, self._clock() + self._timeout_s)
            order = PullOrder(
                pull=number,
                source=sample.source,
                token_ids=[*request.prompt_ids, *sample.prefix_ids],
                tags=tags,
                timeout_s=self._timeout_s,
            )
            self._orders.order(order)

    def step(self) -> list[TokenChunk]:
        self._hand_on()
        return self._engine.step()

    def _hand_on(self) -> None:
        """Submit what has waited long enough."""
        ends = {end.pull: end for end in self._orders.ended()}
        now = self._clock()
        due = [n for n, waiting in self._waiting.items() if n in ends or now >= waiting.until_s]
        together: dict[int, list[_Waiting]] = defaultdict(list)
        failures: Counter[tuple[str, str]] = Counter()
        for number in due:
            waiting, end = self._waiting.pop(number), ends.get(number, PullEnd(pull=number, cause="it took too long"))
            together[id(waiting.request)].append(waiting)
            self.counts = self.counts.after(end)
            if end.cause:
                failures[waiting.sample.source, end.cause] += 1
        for ready in together.values():
            samples = tuple(waiting.sample for waiting in ready)
            self._engine.submit(msgspec.structs.replace(ready[0].request, samples=samples))
        for (source, cause), count in failures.items():
            log.warning(
                "keys and values of %d samples did not all come from %s (%s): the rest is computed here; so far %s",
                count,
                source,
                cause,
                self.counts,
            )

    def abort(self, groups: Iterable[int] | None = None) -> list[TokenChunk]:
        wanted = None if groups is None else frozenset(groups)
        dropped = self._drop(lambda waiting: wanted is None or waiting.request.group in wanted)
        return [*dropped, *self._engine.abort(wanted)]

    def abort_samples(self, samples: Collection[tuple[int, int]]) -> list[TokenChunk]:
        dropped = self._drop(lambda waiting: (waiting.request.group, waiting.sample.sample) in samples)
        return [*dropped, *self._engine.abort_samples(samples)]

    def abort_waiting(self) -> list[TokenChunk]:
        """Samples whose keys and values are on their way stay: they were sent here just now."""
        return self._engine.abort_waiting()

    def _drop(self, wanted: Callable[[_Waiting], bool]) -> list[TokenChunk]:
        numbers = [number for number, waiting in self._waiting.items() if wanted(waiting)]
        dropped = [self._waiting.pop(number) for number in numbers]
        return [last_chunk(each.request.group, each.sample.sample, FINISH_ABORT) for each in dropped]

    def has_work(self) -> bool:
        return bool(self._waiting) or self._engine.has_work()

    def waitables(self) -> Sequence[Any]:
        return [*self._engine.waitables(), *self._orders.wakeup.waitables()]

    def due_in_s(self) -> float:
        if not self._waiting:
            return self._engine.due_in_s()
        first_s = min(waiting.until_s for waiting in self._waiting.values())
        return min(self._engine.due_in_s(), max(0.0, first_s - self._clock()))

    def stats(self) -> EngineStats:
        """A sample on its way counts as running: it has its place here."""
        stats = self._engine.stats()
        return msgspec.structs.replace(stats, running=stats.running + len(self._waiting))

    # ---- the rest is the engine's ------------------------------------------------------------------------------

    def cache_events(self) -> CacheEvents | None:
        return self._engine.cache_events()

    def weight_specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._engine.weight_specs()

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]] | InWorkers) -> None:
        self._engine.update_weights(version, tensors)
        self.version = self._engine.version

    def call_workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return self._engine.call_workers(method, *args, timeout_s=timeout_s)

    def sleep(self) -> None:
        if self._waiting:
            raise RuntimeError("an engine with samples cannot sleep: abort them first")
        self._engine.sleep()
        self.version = self._engine.version

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        if self.counts != TransferCounts():
            log.info("transfers to this instance: %s", self.counts)
        self._orders.close()
        self._engine.close()
