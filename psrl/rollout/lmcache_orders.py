"""What an instance has its workers fetch: orders go out and ends come back in a thread, since a worker answers between two
decode steps only."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from psrl.net.waiting import Wakeup
from psrl.rollout.lmcache_messages import PullEnd, PullOrder

ANSWER_TIMEOUT_S = 30.0
POLL_S = 0.01

log = logging.getLogger(__name__)


class WorkerOrders:
    """`call`: an engine's `call_workers`. `order` and `ended` never block; `wakeup` is set when something has ended."""

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        self._call = call
        self.wakeup = Wakeup()
        self._orders: queue.SimpleQueue[PullOrder | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[PullEnd] = queue.SimpleQueue()
        self._open: dict[int, list[PullEnd]] = {}
        """Ends so far of each pull, one a worker."""
        self._thread = threading.Thread(target=self._run, name="kv-orders", daemon=True)
        self._thread.start()

    def order(self, order: PullOrder) -> None:
        self._orders.put(order)

    def ended(self) -> list[PullEnd]:
        """Pulls that have ended in every worker since the last call: `tokens` and `moved` of the one that has the least."""
        self.wakeup.clear()
        return [self._ends.get() for _ in range(self._ends.qsize())]

    def close(self) -> None:
        """Returns once no call is under way."""
        self._orders.put(None)
        self._thread.join()
        self.wakeup.close()

    def _run(self) -> None:
        while (orders := self._next_orders()) is not None:
            self._open |= {order.pull: [] for order in orders}
            try:
                plain = [msgspec.to_builtins(order) for order in orders]
                answers = self._call("psrl_pull_prefixes", plain, timeout_s=ANSWER_TIMEOUT_S)
            except Exception as error:  # the engine says by itself if it is dead; the samples need not wait for it
                log.warning("the workers fetch nothing: %s: %s", type(error).__name__, error)
                self._finish([PullEnd(pull=pull, cause=str(error)) for pull in self._open])
                continue
            self._sort(answers)

    def _next_orders(self) -> list[PullOrder] | None:
        """What is to be ordered next, nothing if it is time to ask again; None: the end."""
        try:
            orders = [self._orders.get(timeout=POLL_S if self._open else None)]
            orders += [self._orders.get() for _ in range(self._orders.qsize())]
        except queue.Empty:
            return []
        return None if None in orders else [order for order in orders if order is not None]

    def _sort(self, answers: list[list[dict[str, Any]]]) -> None:
        for answer in answers:
            for end in msgspec.convert(answer, list[PullEnd]):
                if end.pull in self._open:
                    self._open[end.pull].append(end)
        whole = [pull for pull, ends in self._open.items() if len(ends) == len(answers)]
        self._finish([joined(self._open[pull]) for pull in whole])

    def _finish(self, ends: list[PullEnd]) -> None:
        for end in ends:
            del self._open[end.pull]
            self._ends.put(end)
        if ends:
            self.wakeup.set()


def joined(ends: list[PullEnd]) -> PullEnd:
    """Of one pull in all workers: a prefix is as long as where it is shortest.

    >>> joined([PullEnd(pull=1, tokens=32, moved=32), PullEnd(pull=1, tokens=16, moved=0, cause="late")])
    PullEnd(pull=1, tokens=16, moved=0, cause='late')
    """
    cause = next((end.cause for end in ends if end.cause), "")
    return PullEnd(pull=ends[0].pull, tokens=min(e.tokens for e in ends), moved=min(e.moved for e in ends), cause=cause)
