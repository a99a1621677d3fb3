"""cache_aware_v1: the least work, counting what is cached in two tiers against what is waiting at each instance.

The cost of a request at an instance is the KV tokens that it already holds, plus the tokens of the request, minus the
worth of those that need not be computed: `gpu_weight` for each in the engine's cache, `offload_weight` for each that
fell out of it and is in the offload tier. What the engine's cache holds is what the engine reports, and else inferred from
its size; the offload tier has what left that cache, and is as large as the rest of `max_capacities`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psrl.coordinator.routing.base import Pool, Work
from psrl.coordinator.routing.cache_aware import CacheAware
from psrl.coordinator.routing.cache_settings import CacheSettings
from psrl.coordinator.routing.prefixes import PrefixMemory
from psrl.coordinator.views import InstanceView


class CacheAwareV1(CacheAware):
    """Like cache_aware with the weighing instead of the choice of the longest prefix: an uneven load still goes to the
    least busy, and full or overloaded instances come last."""

    def __init__(self, settings: CacheSettings) -> None:
        super().__init__(settings)
        self._offloaded = PrefixMemory()

    def choose(self, work: Work, pools: Sequence[Pool]) -> InstanceView | None:
        rows = self._takers(work, pools)
        if not len(rows):
            return None
        roomy = rows[self._fleet.kv_usage[rows] <= self.settings.full_usage]
        rows = roomy if len(roomy) else rows
        if self._uneven(pools):
            return self._fleet.view(self._least_busy(rows))
        costs = self._fleet.kv_tokens[rows] + work.weight - self._saved(work)[rows]
        return self._fleet.view(int(rows[costs.argmin()]))

    def _saved(self, work: Work) -> np.ndarray:
        """Worth of what each instance has cached of the request, in tokens; the prompt of a group is computed once."""
        size = len(self._fleet)
        gpu = self._overlap(self._cached, work, size)
        offloaded = np.maximum(self._overlap(self._offloaded, work, size) - gpu, 0.0)
        return self.settings.gpu_weight * gpu + self.settings.offload_weight * offloaded

    def _overlap(self, memory: PrefixMemory, work: Work, size: int) -> np.ndarray:
        """Tokens that each row has cached, 0 where that is too small a share to count."""
        tokens = np.zeros(size)
        least = self.settings.cache_threshold * work.tokens
        found = [(n * self.block_size, holders) for n, holders in memory.longest_first(work.blocks)]
        for cached, holders in reversed(found):
            if cached >= least:
                tokens[np.fromiter(holders, np.int64, len(holders))] = cached
        return tokens

    def _remember(self, row: int, work: Work) -> None:
        """What falls out of the engine's cache is in the offload tier from then on."""
        super()._remember(row, work)
        if row not in self._reported:
            self._offload(row, self._cached.trim(row, self._blocks(row, 1.0)))

    def _removed(self, row: int, blocks: Sequence[int]) -> None:
        super()._removed(row, blocks)
        self._offload(row, blocks)

    def _offload(self, row: int, gone: Sequence[int]) -> None:
        """`gone`: the longest unused first."""
        if gone and self.settings.offload_weight:
            self._offloaded.remember(row, gone[::-1])
            most = self._blocks(row, self.settings.max_capacities - 1.0)
            if self._offloaded.size(row) > 2 * most:
                self._offloaded.trim(row, most)

    def tidy(self, now_s: float) -> None:
        if now_s - self._tidied_s >= self.settings.tidy_interval_s:
            self._tidied_s = now_s
            for row in self._offloaded.rows():
                self._offloaded.trim(row, self._blocks(row, self.settings.max_capacities - 1.0))

    def _clear(self, row: int) -> None:
        super()._clear(row)
        self._offloaded.forget(row)
