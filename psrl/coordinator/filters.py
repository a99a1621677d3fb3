"""When so many groups in a row carried no signal that going on is pointless. Pure; follows the journal like the prompts.

>>> budget = FilterBudget(limit=2, buffer_entries=1, metric="seq_reward")
>>> for group in range(3):
...     budget.apply(Release(group, REASON_FILTERED, "dropped"))
>>> budget.verdict()[:11]
'0 of 3 grou'
"""

from __future__ import annotations

from psrl.coordinator.records import REASON_FILTERED, AnyRecord, Occupy, Release, Start

LIMIT_KEY = "algorithm.filter_groups.max_num_gen_batches"


class FilterBudget:
    """Counts filtered groups since the last one that was kept. A coordinator's restart goes on counting (the ledger is
    replayed), a trainer's start begins anew: whoever starts the run again grants it the whole budget."""

    __slots__ = ("buffer_entries", "in_a_row", "limit", "metric")

    def __init__(self, *, limit: int, buffer_entries: int, metric: str) -> None:
        self.limit = limit
        self.buffer_entries = buffer_entries
        self.metric = metric
        self.in_a_row = 0

    def apply(self, record: AnyRecord) -> None:
        """Follow one record of the journal."""
        if isinstance(record, Release) and record.reason == REASON_FILTERED:
            self.in_a_row += 1
        elif isinstance(record, Occupy | Start):
            self.in_a_row = 0

    def verdict(self) -> str | None:
        """Why the run ends, in one sentence; None while it goes on."""
        if self.in_a_row <= self.limit * self.buffer_entries:
            return None
        return (
            f"0 of {self.in_a_row} groups in a row could train: algorithm.filter_groups.metric={self.metric} was the same "
            f"for all samples of each, and {LIMIT_KEY}={self.limit} buffers of {self.buffer_entries} groups is the limit; "
            "use easier or harder prompts, more samples a group, another reward, or a higher limit"
        )
