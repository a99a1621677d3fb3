"""Pull when that is estimated to bring the fleet more tokens than it costs.

The estimate, in tokens, for an instance at version V with the published version v:

    gain = (started(v) - started(V)) x mean response length
           - throughput x (pause + KV tokens x prefill time of a token)

- started(x): samples that the instance could start at once if it held version x, min(free places, what there is to start).
  At V that is what waits for versions up to V, and the groups that may still be reserved at V: less and less as the window
  of open buffers moves on, at last nothing. At v it is the same for v, less what the instances that hold or pull v already
  will take. A free place that only new weights can fill is all that a pull can win, and a mean response is what fills it.
- throughput x (...): what its samples would have made while decoding stands still for the switch, as long as last time, and
  while their prompts and partial responses are prefilled again, at the engine's own mean time for a token. An engine that
  does not say how long it prefills counts each such token as one decoded, which bounds the cost from above.

Cheapest first, and each that pulls leaves less to start for the next: of many idle instances no more pull than there is
work for.
"""

from __future__ import annotations

from collections.abc import Sequence

from psrl.coordinator.sync.moment import Moment
from psrl.coordinator.sync.settings import SyncSettings
from psrl.coordinator.sync.status_based import unhindered
from psrl.coordinator.views import InstanceView


class HypothesisTest:
    """`threshold`: pull only if the gain is above this many tokens."""

    whole_fleet = True

    def __init__(self, settings: SyncSettings) -> None:
        self.settings = settings

    def choose(self, lagging: Sequence[InstanceView], moment: Moment) -> list[InstanceView]:
        unclaimed = unclaimed_samples(moment)
        if not unclaimed:
            return []
        chosen = []
        by_cost = sorted((cost_tokens(i), i.name, i) for i in unhindered(self.settings, lagging, moment))
        for cost, _, view in by_cost:
            if unclaimed * moment.mean_response_tokens - cost <= self.settings.threshold:
                break  # nor would it pay for any that costs more
            if gain_tokens(view, moment, unclaimed) > self.settings.threshold:
                chosen.append(view)
                unclaimed -= min(moment.free_slots(view), unclaimed)
        return chosen


def unclaimed_samples(moment: Moment) -> int:
    """Samples to start at the published version that no instance which holds or pulls it has a place for."""
    there = moment.startable(moment.version)
    newest = (moment.version, moment.incarnation)
    for view in moment.instances:
        if there > 0 and (view.pulling == moment.version or (view.version, view.incarnation) == newest):
            there -= moment.free_slots(view)
    return max(0, there)


def gain_tokens(view: InstanceView, moment: Moment, unclaimed: int) -> float:
    """The estimate above, `unclaimed` being what there is to start at the published version."""
    places = moment.free_slots(view)
    more = min(places, unclaimed) - min(places, moment.startable(view.version))
    return more * moment.mean_response_tokens - cost_tokens(view)


def cost_tokens(view: InstanceView) -> float:
    """What a pull loses at this instance.

    >>> from psrl.protocol.generation import EngineStats
    >>> stats = EngineStats(kv_tokens=1000, prompt_tokens=5000, prefill_s=2.5)  # half a millisecond a token
    >>> cost_tokens(InstanceView("i", "", 8, in_flight=4, throughput=80.0, pause_s=0.5, stats=stats))
    80.0
    """
    if not view.in_flight:
        return 0.0
    stats, again = view.stats, float(view.stats.kv_tokens)
    if stats.prompt_tokens and stats.prefill_s:
        again = min(again, view.throughput * again * stats.prefill_s / stats.prompt_tokens)
    return view.throughput * view.pause_s + again
