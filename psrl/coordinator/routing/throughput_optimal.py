"""throughput_optimal: where a request adds the most decoded tokens a second, by a cost model of the engine.

With m samples of t tokens each and T the throughput of n sequences that hold kv tokens, the gain at an instance is
T(n + m, kv + m t) - T(n, kv). Where even the largest gain is small, the fleet is saturated: more sequences would slow the
others down for nothing, and the request waits at the router, where it can still go anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psrl.coordinator.routing.base import Pool, Router, Work, kv_load
from psrl.coordinator.routing.columns import Columns
from psrl.coordinator.views import InstanceView
from psrl.protocol.cost_model import CostModel


class ThroughputOptimal(Router):
    """`delta_threshold` in [0, 1]: hold back below this share of the gain at an empty instance. An empty instance that may
    take the work is never passed by in favour of waiting. Equal gains: the earlier pool, then who joined first."""

    counts_tokens = True

    def __init__(self, model: CostModel, delta_threshold: float) -> None:
        self.model = model
        self.delta_threshold = delta_threshold
        self._fleet = Columns()

    def update(self, view: InstanceView, free: int) -> None:
        self._fleet.update(view, free, self.model.throughput(view.in_flight, kv_load(view)))

    def forget(self, view: InstanceView) -> None:
        self._fleet.forget(view)

    def choose(self, work: Work, pools: Sequence[Pool]) -> InstanceView | None:
        best, chosen = -np.inf, None
        for pool in pools:
            rows = self._fleet.rows(pool, work.num_samples)
            if len(rows):
                gains = self._gains(rows, work)
                at = int(gains.argmax())
                if gains[at] > best:
                    best, chosen = float(gains[at]), self._fleet.view(int(rows[at]))
        at_empty = self.model.throughput(work.num_samples, work.weight)
        if work.may_wait and best < self.delta_threshold * at_empty:
            return None
        return chosen

    def _gains(self, rows: np.ndarray, work: Work) -> np.ndarray:
        """Tokens a second that `work` would add at each of `rows`."""
        model, num_seqs = self.model, self._fleet.in_flight[rows] + work.num_samples
        kv_tokens = self._fleet.kv_tokens[rows] + work.weight
        other = np.maximum(model.other_threshold, model.other_latency_b + model.other_latency_k * num_seqs)
        latency = other + model.attn_latency_b + model.attn_latency_k * kv_tokens
        return num_seqs / latency - self._fleet.rate[rows]


class ThroughputOptimalWithBudget(ThroughputOptimal):
    """The same with the KV tokens that a request is expected to hold when it ends: its response so far and what remains.
    A request that will grow long then counts as heavy from the start, wherever it goes."""

    counts_budget = True
