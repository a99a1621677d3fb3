"""How busy an instance is: the indicators that sync and migration go by, out of what is known of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from psrl.coordinator.views import InstanceView
from psrl.protocol.generation import EngineStats

REQUEST_NUM, THROUGHPUT, KV_CACHE = "request_num", "throughput", "kv_cache"

RATE_WINDOW_S = 0.5
"""A throughput is the mean over at least this long: decode steps come in bursts, a prefill between them."""


def load(view: InstanceView, indicator: str) -> float:
    """Samples placed there (request_num), tokens generated a second (throughput) or percent of its KV cache in use
    (kv_cache). An instance without a sample has no load, whatever it reported last.

    >>> load(InstanceView("i", "", 8, in_flight=2, stats=EngineStats(kv_usage=0.25)), "kv_cache")
    25.0
    """
    return loads([view], indicator)[0]


def loads(views: Iterable[InstanceView], indicator: str) -> list[float]:
    """`load` of each, in one go: a look at a large fleet is made of little else."""
    if indicator == REQUEST_NUM:
        return [float(i.in_flight) for i in views]
    if indicator == THROUGHPUT:
        return [i.throughput if i.in_flight else 0.0 for i in views]
    if indicator == KV_CACHE:
        return [100.0 * i.stats.kv_usage if i.in_flight else 0.0 for i in views]
    raise ValueError(f"no indicator {indicator}: there are {REQUEST_NUM}, {THROUGHPUT} and {KV_CACHE}")


def observe(view: InstanceView, stats: EngineStats, at_s: float, now_s: float) -> None:
    """Take a report in. `at_s` is the engine's clock when it was made, `now_s` ours when it came.

    The throughput is measured between two reports at least RATE_WINDOW_S apart; a count that went back (a new engine) or
    an idle time before this report starts it afresh.
    """
    elapsed_s = at_s - view.counted_from_s
    tokens = stats.generated_tokens - view.counted_from_tokens
    was_idle = not view.stats.running and not view.stats.waiting
    if elapsed_s < 0 or tokens < 0 or was_idle:
        view.counted_from_s, view.counted_from_tokens = at_s, stats.generated_tokens
    elif elapsed_s >= RATE_WINDOW_S:
        view.throughput = tokens / elapsed_s
        view.counted_from_s, view.counted_from_tokens = at_s, stats.generated_tokens
    view.stats, view.reported_s = stats, now_s
    view.grown_tokens = max(0.0, stats.kv_tokens - view.placed_tokens)


def free_slots(view: InstanceView, limit: int, reject_on_waiting: bool) -> int:
    """Further samples that may be placed there now; 0 where nothing new is routed to."""
    if view.leaving or view.draining or (reject_on_waiting and view.in_flight and view.stats.waiting):
        return 0
    return max(0, min(limit, view.max_concurrent, view.fits) - view.in_flight)
