"""Random fleets under every strategy: no sample is lost or made twice, and every run comes to its end."""

from __future__ import annotations

import pytest
from fleet_model import Fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.coordinator.migration import MigrationSettings
from psrl.coordinator.sync.settings import SyncSettings

pytestmark = pytest.mark.unit

BUFFER = 2
INDICATORS = ("request_num", "throughput", "kv_cache")

sync_settings = st.one_of(
    st.just(SyncSettings()),
    st.builds(
        SyncSettings,
        method=st.just("status_based"),
        indicator=st.sampled_from((*INDICATORS, "hypothesis_test")),
        threshold=st.sampled_from((0.0, 1.0, 3.0, 1e9)),
        check_req_before_sync=st.booleans(),
        seamless_train_version=st.sampled_from((0, 2, 99)),
    ),
)
migration_settings = st.one_of(
    st.none(),
    st.builds(
        MigrationSettings,
        indicator=st.sampled_from(INDICATORS),
        threshold=st.sampled_from((1.5, 3.0)),
        stop_indicator=st.sampled_from(INDICATORS),
        stop_threshold=st.sampled_from((0.0, 3.0)),
    ),
)


@st.composite
def fleets(draw) -> Fleet:
    partial = draw(st.booleans())
    shortest = draw(st.integers(1, 4))
    return Fleet(
        lambda group, sample: shortest + (group * 7 + sample * 3) % 5 * (1 + 3 * (group % 4 == 0)),
        instances=draw(st.integers(1, 4)),
        agents=draw(st.integers(1, 2)),
        buffer_entries=BUFFER,
        staleness=draw(st.integers(0, 2)),
        steps=draw(st.integers(1, 4)),
        samples_per_group=draw(st.integers(1, 3)),
        max_concurrent=draw(st.sampled_from((3, 5, 1024))),
        partial_rollout=partial,
        sync=draw(sync_settings),
        migration=draw(migration_settings) if partial else None,
        startup_timeout_s=1e9,
    )


@settings(max_examples=150)
@given(fleet=fleets(), data=st.data())
def test_no_sample_is_lost_or_made_twice_in_any_order_and_the_run_ends(fleet: Fleet, data: st.DataObject) -> None:
    staleness = fleet.run.core.staleness.staleness
    for choice in data.draw(st.lists(st.integers(0, 999), max_size=150)):
        if fleet.over:
            break
        moves = fleet.possible()
        if choice % 10 == 0 and (faults := fleet.faults()):
            moves = faults
        moves[choice % len(moves)][1]()
    for instance in fleet.instances.values():
        if not instance.alive:
            fleet.restart(instance)
    fleet.calm(rounds=500)
    fleet.check_end(BUFFER, staleness)


@settings(max_examples=60)
@given(sync=sync_settings, staleness=st.integers(0, 3), instances=st.integers(1, 5), partial=st.booleans())
def test_a_quiet_run_ends_under_every_strategy(
    sync: SyncSettings, staleness: int, instances: int, partial: bool
) -> None:
    """Nothing goes wrong here: what could stop the run is the strategy alone."""
    fleet = Fleet(
        lambda group, sample: 1 + (group + sample) % 3 * 5,
        instances=instances,
        buffer_entries=BUFFER,
        staleness=staleness,
        steps=5,
        samples_per_group=2,
        partial_rollout=partial,
        sync=sync,
    )
    fleet.calm(rounds=500)
    fleet.check_end(BUFFER, staleness)
    assert fleet.run.core.counters["pulls"] >= instances
