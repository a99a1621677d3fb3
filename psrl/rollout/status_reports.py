"""When an instance tells the coordinator what its engine does: on change, within bounds. Pure: time is passed in."""

from __future__ import annotations

import math

from psrl.protocol.generation import EngineStats

KV_STEP = 0.01
"""A change of KV usage that is worth a report."""
RATE_REPORTS = 5
"""While nothing but tokens changes, a report comes every so many intervals: a throughput is measured between them."""


class StatusReports:
    """At most one report an `interval_s`; 0: none at all.

    >>> reports = StatusReports(0.1)
    >>> reports.due(EngineStats(running=1), 5.0)
    True
    >>> reports.sent(EngineStats(running=1), 5.0)
    >>> reports.due(EngineStats(running=2), 5.05), reports.due(EngineStats(running=2), 5.1)
    (False, True)
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._last = EngineStats()
        self._last_s = -math.inf

    def due(self, stats: EngineStats, now_s: float, other_news: bool = False) -> bool:
        """Whether these figures should be reported now; `other_news`: there is something else to tell with them."""
        return self.may_report(now_s) and (other_news or self._moved(stats, now_s))

    def may_report(self, now_s: float) -> bool:
        """Whether it is worth while to ask the engine for its figures."""
        return bool(self.interval_s) and now_s >= self._last_s + self.interval_s

    def sent(self, stats: EngineStats, now_s: float) -> None:
        self._last, self._last_s = stats, now_s

    def forget(self) -> None:
        """Whoever had heard is gone: tell all of it again."""
        self._last = EngineStats()

    def due_in_s(self, stats: EngineStats, now_s: float, other_news: bool = False) -> float:
        """Seconds until a change that came too soon after the last report is due; infinite if there is none."""
        left_s = self._last_s + self.interval_s - now_s
        return left_s if self.interval_s and left_s > 0 and (other_news or self._moved(stats, now_s)) else math.inf

    def _moved(self, stats: EngineStats, now_s: float) -> bool:
        last = self._last
        return (
            (stats.running, stats.waiting, stats.preemptions) != (last.running, last.waiting, last.preemptions)
            or abs(stats.kv_usage - last.kv_usage) >= KV_STEP
            or (
                stats.generated_tokens != last.generated_tokens
                and now_s >= self._last_s + RATE_REPORTS * self.interval_s
            )
        )
