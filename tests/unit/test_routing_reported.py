"""The cache-aware methods' memory against what engines report of their prefix caches."""

from __future__ import annotations

import pytest
from routing_methods import fleet_of, place, view

from psrl.coordinator.routing.base import Work
from psrl.coordinator.routing.cache_aware import CacheAware
from psrl.coordinator.routing.cache_aware_v1 import CacheAwareV1
from psrl.coordinator.routing.cache_settings import CacheSettings
from psrl.protocol.generation import CacheEvents

pytestmark = pytest.mark.unit

LONG = tuple(range(1, 11))
"""Ten blocks of 16 tokens."""
WORK = Work(tokens=160.0, blocks=LONG)


@pytest.fixture(params=[CacheAware, CacheAwareV1])
def router(request):
    return request.param(CacheSettings())


def two(router):
    """`a` has less to do, so whoever goes to `b` goes there for its cache."""
    a, b = view("a", 5, placed_tokens=100.0), view("b", 6, placed_tokens=150.0)
    return a, b, fleet_of(router, a, b)


def best(fleet, work=WORK):
    """Where it would go, without going there."""
    return fleet.choose(work, 0, fleet.versions(0)).name


def test_what_is_reported_is_believed_from_the_first_word_on(router) -> None:
    _, b, fleet = two(router)
    router.cache_reported(b, CacheEvents(cleared=True, stored=list(LONG)))  # no choice was made before
    assert best(fleet) == "b"


def test_what_was_evicted_is_believed_no_longer(router) -> None:
    _, b, fleet = two(router)
    router.cache_reported(b, CacheEvents(stored=list(LONG)))
    router.cache_reported(b, CacheEvents(removed=list(LONG)))
    assert best(fleet) == "a"
    router.cache_reported(b, CacheEvents(stored=list(LONG)))
    router.cache_reported(b, CacheEvents(cleared=True))
    assert best(fleet) == "a"


def test_what_was_sent_is_believed_until_the_second_report_does_not_name_it(router) -> None:
    _, b, fleet = two(router)
    router.cache_reported(b, CacheEvents())
    router.placed(b, WORK)
    assert best(fleet) == "b"
    router.cache_reported(b, None)  # was on its way already
    assert best(fleet) == "b"
    router.cache_reported(b, None)
    assert best(fleet) == "a"


def test_what_was_sent_and_is_confirmed_stays(router) -> None:
    _, b, fleet = two(router)
    router.cache_reported(b, CacheEvents())
    router.placed(b, WORK)
    router.cache_reported(b, CacheEvents(stored=list(LONG)))
    for _ in range(3):
        router.cache_reported(b, None)
    assert best(fleet) == "b"


def test_an_engine_that_does_not_say_is_believed_to_keep_what_it_was_sent(router) -> None:
    _, b, fleet = two(router)
    fleet.versions(0)
    router.placed(b, WORK)
    for _ in range(5):
        router.cache_reported(b, None)
    assert best(fleet) == "b"


def test_new_weights_clear_and_what_is_reported_after_them_counts(router) -> None:
    a, b, fleet = two(router)
    router.cache_reported(b, CacheEvents(stored=list(LONG)))
    a.version = b.version = 1
    assert best(fleet) == "a"
    a.version = b.version = 2
    router.cache_reported(b, CacheEvents(cleared=True, stored=list(LONG)))  # heard before the next choice
    assert best(fleet) == "b"


def test_an_instance_that_comes_anew_begins_with_nothing(router) -> None:
    _, b, fleet = two(router)
    router.cache_reported(b, CacheEvents(stored=list(LONG)))
    assert best(fleet) == "b"
    fleet.remove(b)
    again = view("b", 6, placed_tokens=150.0)
    fleet.add(again)
    assert best(fleet) == "a"
    router.placed(again, WORK)  # and whether it reports is not known yet
    router.cache_reported(again, None)
    router.cache_reported(again, None)
    assert best(fleet) == "b"


@pytest.mark.parametrize(("weight", "chosen"), [(0.0, "a"), (0.5, "b")])
def test_what_an_engine_evicts_is_in_the_offload_tier(weight, chosen) -> None:
    """150 - 0.5 x 160 < 100 < 150."""
    router = CacheAwareV1(CacheSettings(offload_weight=weight))
    _, b, fleet = two(router)
    router.cache_reported(b, CacheEvents(stored=list(LONG)))
    router.cache_reported(b, CacheEvents(removed=list(reversed(LONG))))
    assert best(fleet) == chosen


def test_what_a_full_cache_holds_is_not_cut_to_its_size_by_inference() -> None:
    """A cache of 160 tokens that reports more than it seems to hold: prompts are shared by several requests."""
    router = CacheAwareV1(CacheSettings())
    _, b, fleet = two(router)
    b.stats.kv_capacity_tokens = 160
    router.cache_reported(b, CacheEvents(stored=[*LONG, *range(101, 111)]))
    assert place(fleet, WORK).name == "b"
    assert place(fleet, Work(tokens=160.0, blocks=tuple(range(101, 111)))).name in "ab"
    assert router._cached.size(fleet.router._fleet.row_of["b"]) == 20
