"""The fleet as columns of numbers: methods that weigh every instance do so in a few array operations."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from psrl.coordinator.routing.base import Pool, kv_load, pool_of
from psrl.coordinator.views import InstanceView

FIRST_ROWS = 64


class Columns:
    """One row an instance; a row that became free is used again. Arrays are as long as `len(self)`."""

    def __init__(self) -> None:
        self.views: list[InstanceView | None] = []
        self.row_of: dict[str, int] = {}
        self._unused: list[int] = []
        self._pools: dict[Pool, int] = {}
        """A number for each pool."""
        self._size = 0
        self._pool = np.zeros(FIRST_ROWS, np.int64)
        self._free = np.zeros(FIRST_ROWS, np.int64)
        self._in_flight = np.zeros(FIRST_ROWS, np.float64)
        self._kv_tokens = np.zeros(FIRST_ROWS, np.float64)
        self._kv_usage = np.zeros(FIRST_ROWS, np.float64)
        self._rate = np.zeros(FIRST_ROWS, np.float64)

    def __len__(self) -> int:
        return self._size

    @property
    def in_flight(self) -> np.ndarray:
        return self._in_flight[: self._size]

    @property
    def kv_tokens(self) -> np.ndarray:
        return self._kv_tokens[: self._size]

    @property
    def kv_usage(self) -> np.ndarray:
        return self._kv_usage[: self._size]

    @property
    def rate(self) -> np.ndarray:
        """A method's own number for each instance, as `update` was given it."""
        return self._rate[: self._size]

    def update(self, view: InstanceView, free: int, rate: float = 0.0) -> int:
        """Write the row of `view`; returns its number."""
        row = self.row_of.get(view.name)
        if row is None:
            row = self.row_of[view.name] = self._new_row()
        self.views[row] = view
        pool = pool_of(view)
        self._pool[row] = self._pools.setdefault(pool, len(self._pools))
        self._free[row] = free
        self._in_flight[row] = view.in_flight
        self._kv_tokens[row] = kv_load(view)
        self._kv_usage[row] = view.stats.kv_usage
        self._rate[row] = rate
        return row

    def forget(self, view: InstanceView) -> int | None:
        """Returns the row that is free now, None if `view` had none."""
        row = self.row_of.pop(view.name, None)
        if row is not None:
            self.views[row] = None
            self._free[row] = self._pool[row] = -1
            heappush(self._unused, row)
        return row

    def rows(self, pool: Pool, need: int = 0) -> np.ndarray:
        """Rows of a pool with at least `need` free places, in order."""
        number = self._pools.get(pool, -2)
        of_pool = self._pool[: self._size] == number
        return np.flatnonzero(of_pool & (self._free[: self._size] >= need) if need else of_pool)

    def view(self, row: int) -> InstanceView:
        found = self.views[row]
        assert found is not None  # `rows` never names an unused one
        return found

    def _new_row(self) -> int:
        if self._unused:
            return heappop(self._unused)
        if self._size == len(self._pool):
            for name in ("_pool", "_free", "_in_flight", "_kv_tokens", "_kv_usage", "_rate"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self.views.append(None)
        self._size += 1
        return self._size - 1
