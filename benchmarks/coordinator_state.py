"""How fast the coordinator's state is: groups a second with the ledger on, and the replay of a million records.

    python benchmarks/coordinator_state.py [--records 1000000] [--directory DIR]

Prints each figure beside its limit; exit status 1 if one is missed. One core, one process.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from psrl.coordinator.ledger import Ledger, replay
from psrl.coordinator.prompts import PromptSource
from psrl.coordinator.records import AnyRecord
from psrl.coordinator.staleness import Staleness
from psrl.protocol.samples import SampleRef

BUFFER_ENTRIES = 512
STALENESS = 2
SAMPLES_PER_GROUP = 16
NUM_PROMPTS = 17_000
CHECKPOINT_EVERY = 20
PAIRS_PER_FLUSH = 256
PAIRS_LIMIT_PER_S = 20_000
REPLAY_LIMIT_S = 20.0


def fresh() -> tuple[Staleness, PromptSource]:
    return (
        Staleness(buffer_entries=BUFFER_ENTRIES, staleness=STALENESS),
        PromptSource(num_prompts=NUM_PROMPTS, seed=0),
    )


def live(directory: Path, num_pairs: int) -> tuple[float, float]:
    """`num_pairs` groups through reserve, occupy, take and publish, each applied and journalled: seconds, and those of
    them that this process computed (the rest is the disk's)."""
    state, prompts = fresh()
    ledger = Ledger.open(directory)
    tokens = [700] * SAMPLES_PER_GROUP

    def commit(records: list[AnyRecord]) -> None:
        for record in records:
            state.apply(record)
            prompts.apply(record)
        ledger.append(records)

    started, cpu_started = time.perf_counter(), time.process_time()
    commit([*state.start(0, "benchmark")])
    in_flight: list[int] = []
    for pair in range(num_pairs):
        while len(in_flight) < BUFFER_ENTRIES and (position := prompts.peek()) is not None:
            reserve = state.reserve(
                version=state.version,
                data_epoch=position.data_epoch,
                prompt=position.prompt,
                instance="instance-0",
                attempt=position.attempt,
            )
            if reserve is None:
                break
            commit([reserve])
            in_flight.append(reserve.group)
        group = in_flight.pop(0)
        ref = SampleRef(f"agent-0/{state.version:06d}", pair * 4096, 4096, 123456789, tokens)
        commit([*state.occupy(group, ref, 0.5, 11_200)])
        if take := state.take(state.version):
            commit([take])
            if publish := state.publish(state.version + 1):
                commit([publish])
            if state.version % CHECKPOINT_EVERY == 0 and (checkpoint := state.checkpoint(state.version)):
                commit([checkpoint])
        if pair % PAIRS_PER_FLUSH == PAIRS_PER_FLUSH - 1:
            ledger.flush(sync=True)
    ledger.flush(sync=True)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    ledger.close()
    return seconds, cpu_s


def replayed(directory: Path) -> tuple[int, float]:
    """(records, seconds) of a replay into fresh state."""
    state, prompts = fresh()
    started = time.perf_counter()
    count = 0
    for record in replay(directory):
        state.apply(record)
        prompts.apply(record)
        count += 1
    return count, time.perf_counter() - started


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000, help="records to write and replay")
    parser.add_argument("--directory", type=Path, help="where the ledger is written; default: a temporary directory")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=args.directory, prefix="coordinator_state_"))
    try:
        num_pairs = args.records // 2
        live(directory / "warm_up", num_pairs // 100)
        before_mib = peak_mib()
        live_s, cpu_s = live(directory / "ledger", num_pairs)
        grown_mib = peak_mib() - before_mib
        size = sum(path.stat().st_size for path in (directory / "ledger").iterdir())
        count, replay_s = replayed(directory / "ledger")
    finally:
        shutil.rmtree(directory)
    pairs_per_s = num_pairs / live_s
    replay_limit_s = REPLAY_LIMIT_S * count / 1_000_000
    print(f"{'figure':<44}{'measured':>14}{'limit':>14}{'ratio':>8}")
    print(
        f"{'reserve+occupy pairs/s, ledger on':<44}{pairs_per_s:>14,.0f}{f'>= {PAIRS_LIMIT_PER_S:,}':>14}"
        f"{pairs_per_s / PAIRS_LIMIT_PER_S:>7.1f}x"
    )
    print(f"{'  the same by CPU time alone':<44}{num_pairs / cpu_s:>14,.0f}")
    print(
        f"{f'replay of {count:,} records, s':<44}{replay_s:>14.2f}{f'< {replay_limit_s:.1f}':>14}"
        f"{replay_limit_s / replay_s:>7.1f}x"
    )
    print(f"{'ledger bytes a pair':<44}{size / num_pairs:>14.0f}")
    print(f"{'peak memory grown over the live run, MiB':<44}{grown_mib:>14.1f}")
    return 0 if pairs_per_s >= PAIRS_LIMIT_PER_S and replay_s < replay_limit_s else 1


if __name__ == "__main__":
    sys.exit(main())
