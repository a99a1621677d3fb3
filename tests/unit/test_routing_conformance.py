"""What every routing method must do, whatever it prefers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_methods import METHODS, fleet_of, place, view

from psrl.coordinator.routing.base import Work
from psrl.protocol.generation import EngineStats

pytestmark = pytest.mark.unit

every_method = pytest.mark.parametrize("method", METHODS)
WORK = Work(4, tokens=100.0, remaining=200.0, blocks=(1, 2, 3), may_wait=False)


@every_method
def test_an_empty_fleet_takes_nothing(method: str) -> None:
    fleet = fleet_of(METHODS[method]())
    assert fleet.versions(0) == [] and place(fleet, WORK) is None and place(fleet, WORK, [0, 1]) is None


@every_method
@pytest.mark.parametrize(
    "closed",
    [
        {"leaving": True},
        {"draining": True},
        {"version": -1},
        {"incarnation": 1},
        {"incarnation": -1},
        {"version": 2},
        {"in_flight": 61},
        {"in_flight": 1, "stats": EngineStats(waiting=1)},
    ],
)
def test_who_may_not_take_work_gets_none(method: str, closed: dict) -> None:
    fleet = fleet_of(METHODS[method](), shut := view("a", in_flight=5), alone := view("b", in_flight=50))
    for name, value in closed.items():
        setattr(shut, name, value)
    for _ in range(3):
        assert place(fleet, WORK, [3, 1, 0]) is alone
    alone.leaving = True
    assert place(fleet, WORK, [3, 1, 0]) is None
    fleet.remove(alone)
    assert place(fleet, WORK, [3, 1, 0]) is None


@every_method
def test_both_limits_hold_to_the_last_place(method: str) -> None:
    fleet = fleet_of(METHODS[method](), view("a", room=10), view("b", room=100), limit=21)
    taken = Counter()
    while chosen := place(fleet, WORK):
        taken[chosen.name] += 4
    assert taken == {"a": 8, "b": 20}
    while chosen := place(fleet, Work(1, tokens=100.0, may_wait=False)):
        taken[chosen.name] += 1
    assert taken == {"a": 10, "b": 21}


@every_method
def test_room_that_comes_back_is_seen(method: str) -> None:
    fleet = fleet_of(METHODS[method](), one := view("a", in_flight=64))
    assert place(fleet, WORK) is None
    one.in_flight = 60
    assert place(fleet, WORK) is one and place(fleet, WORK) is None
    one.in_flight, one.version = 0, 1
    assert place(fleet, WORK, [0]) is None and place(fleet, WORK, [1]) is one


@every_method
def test_a_new_start_under_an_old_name_replaces_it(method: str) -> None:
    fleet = fleet_of(METHODS[method](), old := view("a"))
    assert place(fleet, WORK) is old
    fleet.add(new := view("a"))
    old.in_flight = 0  # nobody listens any more
    assert place(fleet, WORK) is new


@every_method
def test_work_that_goes_somewhere_for_another_reason_is_taken_in(method: str) -> None:
    """Stickiness places without a choice, even at an instance that joined this very moment."""
    fleet = fleet_of(METHODS[method](), view("a", 60), new := view("b"))
    fleet.router.placed(new, WORK)
    new.in_flight = 61
    assert place(fleet, WORK).name == "a"


@every_method
def test_equal_instances_get_equal_shares(method: str) -> None:
    fleet = fleet_of(METHODS[method](), *(view(f"i{k}", room=1000) for k in range(8)))
    for k in range(320):
        assert place(fleet, Work(2, tokens=100.0, blocks=(k,), may_wait=False))
    shares = [v.in_flight for v in fleet._views.values()]
    assert sum(shares) == 640
    assert max(shares) - min(shares) <= (80 if method == "random" else 2)


@every_method
def test_the_same_history_gives_the_same_choices(method: str) -> None:
    assert history(method, 3) == history(method, 3)


def history(method: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    fleet = fleet_of(METHODS[method](), *(view(f"i{k}", rng.randrange(9)) for k in range(6)))
    names = []
    for _ in range(60):
        chosen = place(fleet, Work(rng.choice([1, 4]), tokens=rng.randrange(500), blocks=(rng.randrange(4),)))
        names.append(chosen.name if chosen else "")
        leaver = rng.choice(list(fleet._views.values()))
        leaver.in_flight = max(0, leaver.in_flight - rng.randrange(6))
    return names


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["place", "place_group", "finish", "pull", "drain", "leave", "join", "report", "wait", "incarnation"]
        ),
        st.integers(0, 5),
        st.integers(0, 9),
    ),
    max_size=60,
)


@every_method
@settings(max_examples=40)
@given(steps=events)
def test_a_choice_is_always_one_that_may_take_the_work(method: str, steps: list[tuple[str, int, int]]) -> None:
    """Against a look at every instance, after any history."""
    fleet = fleet_of(METHODS[method](), *(view(f"i{k}", room=12) for k in range(4)), limit=10)
    joined = 4
    for what, which, amount in steps:
        views = list(fleet._views.values())
        one = views[which % len(views)] if views else None
        if what in ("place", "place_group"):
            n = 1 if what == "place" else 4
            versions = list(range(amount % 3, 3))
            able = [
                v
                for v in views
                if not (v.leaving or v.draining or (v.in_flight and v.stats.waiting))
                and v.incarnation == 0
                and v.version in versions
                and v.in_flight + n <= 10
            ]
            chosen = place(fleet, Work(n, tokens=50.0 * amount, blocks=(which, 7), may_wait=False), versions)
            assert chosen in able if able else chosen is None
        elif what == "join":
            fleet.add(view(f"i{joined}", version=amount % 3, room=12))
            joined += 1
        elif one is None:
            continue
        elif what == "finish":
            one.in_flight = max(0, one.in_flight - amount)
        elif what == "pull":
            one.version, one.draining = amount % 4 - 1, False
        elif what == "drain":
            one.draining = bool(amount % 2)
        elif what == "incarnation":
            one.incarnation = int(amount == 0)
        elif what == "leave":
            one.leaving = True
            if amount % 2:
                fleet.remove(one)
        else:
            waiting = amount if what == "wait" else 0
            one.stats = EngineStats(waiting=waiting, kv_usage=amount / 9, kv_capacity_tokens=1000)
