"""When an engine hands its waiting requests back to the router. Pure."""

from __future__ import annotations

from psrl.protocol.generation import EngineStats


class PreemptionWatch:
    """An engine that preempts has more than its KV cache holds. What waits there then waits for its own neighbours to
    finish; at the router it could start at once at an instance that has room.

    A preemption counts until the engine's queue has been empty. `limit`: `max_num_waiting_reqs_after_preemption`.

    >>> watch = PreemptionWatch(limit=1)
    >>> looks = [(0, 5), (1, 1), (1, 2), (1, 0), (1, 2)]  # (preemptions so far, waiting now)
    >>> [watch.hands_back(EngineStats(preemptions=p, waiting=w)) for p, w in looks]
    [False, False, True, False, False]
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._seen = 0
        self._preempted = False

    def hands_back(self, stats: EngineStats) -> bool:
        """Whether all that waits is to be handed back now; ask after each step."""
        if stats.preemptions != self._seen:
            self._seen, self._preempted = stats.preemptions, True
        if not stats.waiting:
            self._preempted = False
        return self._preempted and stats.waiting > self.limit
