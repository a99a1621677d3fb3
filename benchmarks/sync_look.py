"""What a look at the whole fleet costs: who pulls, who hands back. `python benchmarks/sync_look.py`

The fleet has 32 samples an instance in groups of 8, every instance is behind, requests wait, loads are uneven but no
migration is due: the look has to consider everybody and to change nobody, so that it can be repeated.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from report_machine import describe_machine

from psrl.coordinator.core import Coordinator, Settings
from psrl.coordinator.migration import MigrationSettings
from psrl.coordinator.placement import OpenGroup
from psrl.coordinator.prompts import PromptSource
from psrl.coordinator.records import Position
from psrl.coordinator.routing.request_num_balance import RequestNumBalance
from psrl.coordinator.staleness import Staleness
from psrl.coordinator.sync.settings import SyncSettings
from psrl.coordinator.views import InstanceView
from psrl.coordinator.waiting import Waiting
from psrl.protocol.generation import EngineStats

SAMPLES, GROUP = 32, 8
STRATEGIES = {
    "greedy": SyncSettings(),
    "request_num": SyncSettings(method="status_based", indicator="request_num", threshold=1),
    "throughput": SyncSettings(method="status_based", indicator="throughput", threshold=1),
    "kv_cache": SyncSettings(method="status_based", indicator="kv_cache", threshold=1),
    "hypothesis_test": SyncSettings(method="status_based", indicator="hypothesis_test", threshold=1e12),
}


def fleet(size: int, sync: SyncSettings) -> Coordinator:
    """A coordinator in the middle of a run: version 1 is published, every instance holds version 0."""
    settings = Settings(
        samples_per_group=GROUP,
        partial_rollout=True,
        max_concurrent=1024,
        reject_on_waiting=True,
        max_group_retries=1,
        drop_last=True,
        num_instances=size,
        num_agents=1,
        max_instances=20_000,
        startup_timeout_s=1e9,
        missing_timeout_s=1e9,
        drain_grace_s=30.0,
        goes_on=False,
        attempt="",
        sync=sync,
        migration=MigrationSettings(
            indicator="kv_cache", threshold=1e9, stop_indicator="request_num", stop_threshold=1
        ),
    )
    staleness = Staleness(buffer_entries=max(1, size * SAMPLES // GROUP), staleness=2, total_steps=100)
    for record in staleness.start(0, "nonce"):
        staleness.apply(record)
    staleness.version = 1
    core = Coordinator(settings, staleness, PromptSource(num_prompts=1000, seed=0), RequestNumBalance(), 1, 0.0)
    core.pullable_version, rng = 1, random.Random(0)
    for i in range(size):
        stats = EngineStats(running=SAMPLES, kv_usage=rng.uniform(0.1, 0.9), kv_tokens=10_000)
        view = InstanceView(f"instance-{i}", "", 1024, version=0, incarnation=0, stats=stats, throughput=500.0)
        core.placement.add_instance(view)
        view.in_flight = SAMPLES
    core.placement.add_agent("agent-loop-0")
    for group in range(size * SAMPLES // GROUP):
        on = {f"instance-{group * GROUP // SAMPLES}": GROUP}
        core.placement.groups[group] = OpenGroup(Position(0, group), 0, "agent-loop-0", on)
    for sample in range(100):
        core.waiting_routes.add(Waiting(agent="agent-loop-0", group=sample, sample=0, version=1, since_s=0.0))
    return core


def look_ms(size: int, sync: SyncSettings, looks: int) -> float:
    """Median milliseconds of processor time of a look at everybody. Greedy has nobody left to look at after its first."""
    core, times = fleet(size, sync), []
    for i in range(looks):
        begun = time.process_time()
        core._look(1.0 + i)
        times.append(1000 * (time.process_time() - begun))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--looks", type=int, default=20)
    arguments = parser.parse_args()
    print(describe_machine())
    print("milliseconds of processor time of one look at all instances, sync and migration (median)")
    print(f"{'instances':>16}" + "".join(f"{size:>10,}" for size in arguments.sizes))
    for name, sync in STRATEGIES.items():
        row = [look_ms(size, sync, arguments.looks) for size in arguments.sizes]
        print(f"{name:>16}" + "".join(f"{ms:>10.2f}" for ms in row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
