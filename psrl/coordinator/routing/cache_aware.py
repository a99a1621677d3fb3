"""cache_aware: where most of the prompt is cached already, as long as the load is even.

What counts as prefix: the prompt's blocks (few-shot examples, a system prompt, the same prompt again) and, for a sample
that was moved on purpose or has several turns, its own tokens so far at the instance that had them. An engine drops its
cache when it takes new weights, so does this memory. An engine that reports its cache has the last word on it (`reported`);
of another one it is assumed that it keeps prefixes, and one that does not gains nothing from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psrl.coordinator.routing.base import Pool, Router, Work, pool_of
from psrl.coordinator.routing.cache_settings import CacheSettings
from psrl.coordinator.routing.columns import Columns
from psrl.coordinator.routing.prefixes import PrefixMemory
from psrl.coordinator.routing.reported import Reported
from psrl.coordinator.views import InstanceView
from psrl.protocol.generation import CacheEvents


class CacheAware(Router):
    """In this order: an uneven load goes to the least busy; then the longest cached prefix, if it is long enough, at the
    least busy of those that have it and are not too full; then the least busy. Overloaded instances come last."""

    counts_tokens = True

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.block_size = settings.block_size
        self._fleet = Columns()
        self._cached = PrefixMemory()
        self._reported = Reported()
        self._pool_at: dict[int, Pool] = {}
        self._tidied_s = -np.inf

    def update(self, view: InstanceView, free: int) -> None:
        self._follow(self._fleet.update(view, free), view)

    def forget(self, view: InstanceView) -> None:
        row = self._fleet.forget(view)
        if row is not None:
            self._pool_at.pop(row, None)
            self._clear(row)
            self._reported.forget(row)

    def placed(self, view: InstanceView, work: Work) -> None:
        if (row := self._fleet.row_of.get(view.name)) is not None:  # not yet heard of: it joined this very moment
            self._remember(row, work)

    def left_behind(self, view: InstanceView, work: Work) -> None:
        self.placed(view, work)

    def cache_reported(self, view: InstanceView, events: CacheEvents | None) -> None:
        row = self._fleet.row_of.get(view.name, -1)
        if events is None and row not in self._reported:
            return
        if row < 0:
            row = self._fleet.update(view, 0)  # it has just joined: the next choice hears how much it may take
        self._follow(row, view)  # what an engine says after new weights is about those
        if events is None:
            events = CacheEvents()
        if events.cleared:
            self._clear(row)
        self._removed(row, events.removed)
        self._cached.remember(row, events.stored)
        self._removed(row, self._reported.hear(row, events.stored))

    def tidy(self, now_s: float) -> None:
        if now_s - self._tidied_s >= self.settings.tidy_interval_s:
            self._tidied_s = now_s
            for row in self._cached.rows():
                self._cached.trim(row, self._most_blocks(row))

    def choose(self, work: Work, pools: Sequence[Pool]) -> InstanceView | None:
        rows = self._takers(work, pools)
        if not len(rows):
            return None
        if not self._uneven(pools):
            for row in self._with_prefix(rows, work):
                return self._fleet.view(row)
        return self._fleet.view(self._least_busy(rows))

    # ---- load ------------------------------------------------------------------------------------------------

    def _takers(self, work: Work, pools: Sequence[Pool]) -> np.ndarray:
        """Rows that may take the work, by pool; overloaded ones only if there are no others."""
        found = [self._fleet.rows(pool, work.num_samples) for pool in pools]
        rows = np.concatenate(found) if found else np.zeros(0, np.int64)
        calm = rows[self._fleet.kv_usage[rows] < self.settings.overload_usage]
        return calm if len(calm) else rows

    def _uneven(self, pools: Sequence[Pool]) -> bool:
        """Whether the busiest instance, full ones included, has far more than the least busy."""
        loads = [self._fleet.in_flight[rows] for pool in pools if len(rows := self._fleet.rows(pool))]
        most, least = max(float(x.max()) for x in loads), min(float(x.min()) for x in loads)
        return most - least >= self.settings.balance_abs and most >= self.settings.balance_rel * max(least, 1.0)

    def _least_busy(self, rows: np.ndarray) -> int:
        """Instances that are too full are passed over for others."""
        roomy = rows[self._fleet.kv_usage[rows] <= self.settings.full_usage]
        rows = roomy if len(roomy) else rows
        return int(rows[self._fleet.in_flight[rows].argmin()])

    # ---- cache -----------------------------------------------------------------------------------------------

    def _with_prefix(self, rows: np.ndarray, work: Work) -> list[int]:
        """The best row that has enough of the request cached, if there is one."""
        least_tokens = self.settings.cache_threshold * work.tokens
        for blocks, holders in self._cached.longest_first(work.blocks):
            if blocks * self.block_size < least_tokens:
                break
            holding = rows[np.isin(rows, np.fromiter(holders, np.int64, len(holders)), kind="table")]
            holding = holding[self._fleet.kv_usage[holding] <= self.settings.full_usage]
            if len(holding):
                return [int(holding[self._fleet.in_flight[holding].argmin()])]
        return []

    def _follow(self, row: int, view: InstanceView) -> None:
        """With other weights it begins anew."""
        if self._pool_at.get(row) != pool_of(view):
            self._pool_at[row] = pool_of(view)
            self._clear(row)

    def _remember(self, row: int, work: Work) -> None:
        if row in self._reported:
            new = self._cached.new(row, work.blocks)
            self._cached.remember(row, new)
            self._reported.sent(row, new)
            return
        self._cached.remember(row, work.blocks)
        most = self._most_blocks(row)
        if self._cached.size(row) > 2 * most:  # trimmed in time otherwise
            self._cached.trim(row, most)

    def _most_blocks(self, row: int) -> int:
        return self._blocks(row, self.settings.max_capacities)

    def _blocks(self, row: int, capacities: float) -> int:
        """Blocks in `capacities` KV caches of an instance, within the limit of what is remembered at all."""
        view = self._fleet.views[row]
        capacity = view.stats.kv_capacity_tokens if view is not None else 0
        most = min(self.settings.max_tokens, capacities * capacity) if capacity else self.settings.max_tokens
        return int(most) // self.block_size

    def _removed(self, row: int, blocks: Sequence[int]) -> None:
        """Its engine does not hold these."""
        self._cached.remove(row, blocks)

    def _clear(self, row: int) -> None:
        self._cached.forget(row)
        self._reported.clear(row)
