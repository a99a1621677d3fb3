"""The indicators of load, by hand."""

from __future__ import annotations

import pytest

from psrl.coordinator.load import free_slots, load, observe
from psrl.coordinator.views import InstanceView
from psrl.protocol.generation import EngineStats

pytestmark = pytest.mark.unit


def test_each_indicator_in_its_unit_and_nothing_where_nothing_is() -> None:
    view = InstanceView("i", "", 64, in_flight=3, stats=EngineStats(running=3, kv_usage=0.4), throughput=120.0)
    assert [load(view, i) for i in ("request_num", "throughput", "kv_cache")] == [3.0, 120.0, 40.0]
    view.in_flight = 0
    assert [load(view, i) for i in ("request_num", "throughput", "kv_cache")] == [0.0, 0.0, 0.0]
    view.in_flight = 1
    with pytest.raises(ValueError, match="no indicator hypothesis_test"):
        load(view, "hypothesis_test")


@pytest.mark.parametrize(
    ("reports", "throughput"),
    [  # (the engine's clock, tokens so far, samples running)
        ([(10.0, 0, 1), (10.5, 50, 1)], 100.0),
        ([(10.0, 0, 1), (10.3, 60, 1)], 0.0),  # too short to tell
        ([(10.0, 0, 1), (10.3, 60, 1), (11.0, 100, 1)], 100.0),  # over the whole second
        ([(10.0, 0, 1), (11.0, 100, 1), (12.0, 120, 1)], 20.0),  # of late, not since the start
        ([(10.0, 0, 1), (11.0, 100, 0), (71.0, 100, 1), (72.0, 250, 1)], 150.0),  # a minute's rest does not count
        ([(10.0, 500, 1), (11.0, 3, 1), (12.0, 43, 1)], 40.0),  # a new engine counts from 0
        ([(90.0, 10, 1), (5.0, 20, 1), (6.0, 30, 1)], 10.0),  # another clock
    ],
)
def test_throughput_is_what_was_generated_between_reports(
    reports: list[tuple[float, int, int]], throughput: float
) -> None:
    view = InstanceView("i", "", 64, in_flight=1)
    view.stats = EngineStats(running=1)
    for at_s, tokens, running in reports:
        observe(view, EngineStats(running=running, generated_tokens=tokens), at_s, now_s=1000.0)
    assert view.throughput == pytest.approx(throughput)
    assert view.reported_s == 1000.0


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({}, 6),
        ({"max_concurrent": 4}, 2),
        ({"in_flight": 9}, 0),
        ({"leaving": True}, 0),
        ({"draining": True}, 0),
        ({"stats": EngineStats(waiting=1)}, 0),
    ],
)
def test_free_places_under_both_limits(changes: dict[str, object], free: int) -> None:
    view = InstanceView("i", "", 64, in_flight=2)
    for name, value in changes.items():
        setattr(view, name, value)
    assert free_slots(view, limit=8, reject_on_waiting=True) == free


def test_a_waiting_queue_counts_only_if_asked_for() -> None:
    view = InstanceView("i", "", 64, in_flight=2, stats=EngineStats(waiting=1))
    assert free_slots(view, limit=8, reject_on_waiting=False) == 6
