"""Whose samples are handed back, and when not: decision tables, and what is remembered between two migrations."""

from __future__ import annotations

import pytest

from psrl.coordinator.migration import HAND_BACK_S, SETTLE_S, UNRELIEVED_S, Migrations, MigrationSettings, to_relieve
from psrl.coordinator.views import InstanceView
from psrl.protocol.generation import EngineStats

pytestmark = pytest.mark.unit

FIVE_TIMES = MigrationSettings(indicator="request_num", threshold=5, stop_indicator="request_num", stop_threshold=10)
BY_KV = MigrationSettings(indicator="kv_cache", threshold=3, stop_indicator="kv_cache", stop_threshold=50)


def at(name: str, in_flight: int, version: int = 0, **fields) -> InstanceView:
    return InstanceView(name, "", 64, version=version, in_flight=in_flight, **fields)


def relieved(
    *views: InstanceView,
    settings: MigrationSettings = FIVE_TIMES,
    newest_group: dict[str, int] | None = None,
    full: tuple[str, ...] = (),
    spared: tuple[str, ...] = (),
) -> tuple[str, str] | None:
    found = to_relieve(
        views,
        settings,
        may_give=lambda i: i.name not in spared,
        may_take=lambda i: i.name not in full,
        newest_group=lambda: newest_group or {},
    )
    return found and (found[0].name, found[1].name)


@pytest.mark.parametrize(
    ("busy", "least", "moves"),
    [
        (50, 10, True),
        (49, 10, False),
        (50, 11, False),
        (11, 0, True),  # 0 counts as 1: eleven times as many
        (11, 2, True),
        (11, 3, False),
        (10, 0, False),  # no more than stop_threshold
    ],
)
def test_the_ratio_and_the_absolute_threshold(busy: int, least: int, moves: bool) -> None:
    assert relieved(at("a", least), at("b", busy)) == (("b", "a") if moves else None)


def test_other_indicators_and_a_stop_in_another_unit() -> None:
    def kv(name: str, percent: float, in_flight: int = 4) -> InstanceView:
        return at(name, in_flight, stats=EngineStats(kv_usage=percent / 100))

    assert relieved(kv("a", 20), kv("b", 60), settings=BY_KV) == ("b", "a")
    assert relieved(kv("a", 21), kv("b", 60), settings=BY_KV) is None
    assert relieved(kv("a", 10), kv("b", 50), settings=BY_KV) is None
    mixed = MigrationSettings(indicator="throughput", threshold=4, stop_indicator="request_num", stop_threshold=8)
    fast, slow = at("fast", 9, throughput=400.0), at("slow", 1, throughput=100.0)
    assert relieved(fast, slow, settings=mixed) == ("fast", "slow")
    fast.in_flight = 8
    assert relieved(fast, slow, settings=mixed) is None


def test_only_who_may_serve_all_of_it_and_has_room_is_compared_with() -> None:
    busy, empty, half = at("busy", 60, version=3), at("empty", 0, version=2), at("half", 12, version=3)
    assert relieved(busy, empty, half) == ("busy", "empty")  # none of its groups needs more than version 2
    assert relieved(busy, empty, half, newest_group={"busy": 2}) == ("busy", "empty")
    assert relieved(busy, empty, half, newest_group={"busy": 3}) == ("busy", "half")  # 60 >= 5 x 12
    half.in_flight = 13
    assert relieved(busy, empty, half, newest_group={"busy": 3, "half": 3}) is None
    assert relieved(busy, empty, half, full=("empty", "half")) is None


def test_the_busiest_that_can_be_relieved_gives() -> None:
    views = at("a", 90, version=3), at("b", 60, version=2), at("c", 0, version=2)
    assert relieved(*views, newest_group={"a": 3}) == ("b", "c")
    assert relieved(*views) == ("a", "c")
    assert relieved(*views, spared=("a",)) == ("b", "c")
    assert relieved(at("a", 90)) is None, "alone"
    assert relieved() is None


# ---- between two migrations ------------------------------------------------------------------------------------


def test_a_migration_is_under_way_until_every_sample_has_left() -> None:
    migrations = Migrations()
    assert not migrations.under_way({1, 2}, now_s=0.0)
    migrations.begin("b", {1: 2, 2: 1}, now_s=0.0)
    migrations.left(1, "b", 1)
    migrations.left(2, "a", 1)  # at another instance: not of this migration
    assert migrations.under_way({1, 2}, now_s=0.1)
    migrations.left(1, "b", 1)
    assert migrations.under_way({1, 2}, now_s=0.2)
    assert not migrations.under_way({1}, now_s=0.3), "group 2 was closed: its sample comes back to nobody"


@pytest.mark.parametrize("how", ["gone", "late"])
def test_nothing_keeps_a_migration_under_way_for_ever(how: str) -> None:
    migrations = Migrations()
    migrations.begin("b", {1: 2}, now_s=0.0)
    if how == "gone":
        migrations.forget("b")
    assert migrations.under_way({1}, now_s=HAND_BACK_S - 0.1) is (how == "late")
    assert not migrations.under_way({1}, now_s=HAND_BACK_S)


def test_whom_a_migration_did_not_relieve_is_left_alone_for_a_while() -> None:
    migrations, busy, idle = Migrations(), at("busy", 60), at("idle", 0)
    migrations.begin("busy", {1: 60}, now_s=0.0)
    migrations.note_relief([busy, idle], FIVE_TIMES)
    assert not migrations.may_give(busy, UNRELIEVED_S - 0.1) and migrations.may_give(idle, 1.0)
    assert migrations.may_give(busy, UNRELIEVED_S)


def test_whom_it_did_relieve_may_be_relieved_again_at_once() -> None:
    migrations, busy, idle = Migrations(), at("busy", 30), at("idle", 30)
    migrations.begin("busy", {1: 60}, now_s=0.0)
    migrations.note_relief([busy, idle], FIVE_TIMES)
    assert migrations.may_give(busy, 0.1)


def test_reported_loads_are_believed_only_when_reported_after_the_last_placement() -> None:
    migrations, view = Migrations(), at("b", 5, reported_s=0.0)
    assert migrations.believed([view], BY_KV) == [view]
    migrations.begin("b", {1: 5}, now_s=10.0)
    migrations.left(1, "b", 5)
    assert not migrations.under_way({1}, now_s=11.0)
    view.reported_s = 11.0 + SETTLE_S - 0.01
    assert migrations.believed([view], BY_KV) == []
    assert migrations.believed([view], FIVE_TIMES) == [view], "the coordinator counts samples itself"
    view.reported_s = 11.0 + SETTLE_S
    assert migrations.believed([view], BY_KV) == [view]
    idle = at("a", 0)
    assert migrations.believed([idle], BY_KV) == [idle], "who has nothing reports nothing"
