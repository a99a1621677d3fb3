"""Who pulls: decision tables of each strategy, the right value worked out by hand."""

from __future__ import annotations

import pytest

from psrl.coordinator.sync.greedy import Greedy
from psrl.coordinator.sync.hypothesis_test import HypothesisTest, gain_tokens, unclaimed_samples
from psrl.coordinator.sync.lagging import Lagging
from psrl.coordinator.sync.moment import Moment
from psrl.coordinator.sync.select import make_sync
from psrl.coordinator.sync.settings import SyncSettings
from psrl.coordinator.sync.status_based import StatusBased
from psrl.coordinator.sync.strategy import idle_pulls, pulls
from psrl.coordinator.views import InstanceView
from psrl.protocol.generation import EngineStats

pytestmark = pytest.mark.unit


def behind(name: str = "i", *, prefill: tuple[int, float] = (0, 0.0), **fields) -> InstanceView:
    """At version 2 of incarnation 1; 3 is published. `prefill`: (tokens, seconds) since the engine's start."""
    gauges = {gauge: fields.pop(gauge, 0) for gauge in ("kv_usage", "kv_tokens")}
    stats = EngineStats(running=fields.get("in_flight", 0), prompt_tokens=prefill[0], prefill_s=prefill[1], **gauges)
    known = {"version": 2, "incarnation": 1, "max_concurrent": 8} | fields
    return InstanceView(name, "", stats=stats, **known)


def moment(**facts) -> Moment:
    return Moment(**({"version": 3, "incarnation": 1, "now_s": 10.0} | facts))


def chosen(settings: SyncSettings, view: InstanceView, **facts) -> bool:
    return pulls(make_sync(settings), [view], moment(**facts)) == [view]


# ---- whatever the strategy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "pulls_now"),
    [
        ({"version": 2}, False),  # busy: the threshold of 0 samples keeps it
        ({"version": -1}, True),  # no weights at all
        ({"version": 7, "incarnation": 0}, True),  # of an earlier incarnation, however high its number
        ({"version": -1, "leaving": True}, False),
        ({"version": -1, "pulling": 3}, False),
        ({"version": -1, "quarantined_until_s": 10.1}, False),
        ({"version": -1, "quarantined_until_s": 10.0}, True),
    ],
)
def test_useless_weights_are_always_replaced_as_soon_as_that_can_be(fields: dict[str, object], pulls_now: bool) -> None:
    settings = SyncSettings(method="status_based", threshold=0, seamless_train_version=99)
    assert chosen(settings, behind(in_flight=5, **fields), waiting={0: 1}) is pulls_now


@pytest.mark.parametrize(
    ("fields", "pulls_now"),
    [({}, True), ({"in_flight": 1}, False), ({"leaving": True}, False), ({"quarantined_until_s": 11.0}, False)],
)
def test_whoever_got_nothing_to_do_pulls(fields: dict[str, object], pulls_now: bool) -> None:
    view = behind(**fields)
    assert idle_pulls([view], now_s=10.0) == [view] * pulls_now


def test_greedy_pulls_at_once_however_busy() -> None:
    views = [behind("a", in_flight=8), behind("b"), behind("c", in_flight=3, pulling=3)]
    assert [i.name for i in pulls(Greedy(), views, moment(waiting={0: 9}))] == ["a", "b"]


def test_a_method_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="method=eager does not exist"):
        make_sync(SyncSettings(method="eager"))


# ---- status_based ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indicator", "threshold", "fields", "pulls_now"),
    [
        ("request_num", 3, {"in_flight": 3}, True),
        ("request_num", 3, {"in_flight": 4}, False),
        ("request_num", 0, {"in_flight": 1}, False),
        ("throughput", 100, {"in_flight": 4, "throughput": 100.0}, True),
        ("throughput", 100, {"in_flight": 4, "throughput": 100.1}, False),
        ("kv_cache", 25, {"in_flight": 4, "kv_usage": 0.25}, True),  # percent, not the share
        ("kv_cache", 25, {"in_flight": 4, "kv_usage": 0.26}, False),
        ("kv_cache", 0.25, {"in_flight": 4, "kv_usage": 0.25}, False),
        ("kv_cache", 25, {"in_flight": 0, "kv_usage": 0.9}, True),  # reported before its last sample left
    ],
)
def test_an_instance_pulls_at_or_below_the_threshold(
    indicator: str, threshold: float, fields: dict[str, float], pulls_now: bool
) -> None:
    settings = SyncSettings(method="status_based", indicator=indicator, threshold=threshold)
    assert chosen(settings, behind(**fields)) is pulls_now


@pytest.mark.parametrize(
    ("waiting", "fields", "pulls_now"),
    [
        ({}, {}, True),
        ({2: 1}, {}, False),  # it may serve this one
        ({0: 4}, {}, False),
        ({3: 50}, {}, True),  # only newer weights may: waiting for it would never end
        ({3: 50, 1: 1}, {}, False),
        ({2: 1}, {"in_flight": 8}, True),  # no place: the request gains nothing if it stays
        ({2: 1}, {"draining": True}, True),
    ],
)
def test_requests_that_it_may_still_serve_keep_an_instance(
    waiting: dict[int, int], fields: dict[str, int], pulls_now: bool
) -> None:
    settings = SyncSettings(method="status_based", threshold=8)
    assert chosen(settings, behind(**fields), waiting=waiting) is pulls_now
    careless = SyncSettings(method="status_based", threshold=8, check_req_before_sync=False)
    assert chosen(careless, behind(**fields), waiting=waiting)


@pytest.mark.parametrize(
    ("below", "next_ready", "pulls_now"),
    [(0, False, True), (3, False, True), (4, False, False), (4, True, True)],
)
def test_below_the_seamless_version_only_a_ready_buffer_lets_an_instance_pull(
    below: int, next_ready: bool, pulls_now: bool
) -> None:
    settings = SyncSettings(method="status_based", threshold=8, seamless_train_version=below)
    assert chosen(settings, behind(in_flight=1), next_ready=next_ready) is pulls_now


# ---- hypothesis_test -------------------------------------------------------------------------------------------

WORTH = {"samples_per_group": 4, "mean_response_tokens": 100.0}


def room(**at: int):
    """Groups that may be reserved, by version: room(v2=1, v3=3)."""
    return lambda version: at.get(f"v{version}", 0)


@pytest.mark.parametrize(
    ("fields", "facts", "gain"),
    [
        # 6 free places, nothing to start at version 2, 3 groups of 4 at version 3: 6 samples of 100 tokens, less 150 of KV.
        ({"in_flight": 2, "kv_tokens": 150}, {"room": room(v3=3)}, 600 - 150),
        # The same with decoding at 50 tokens/s standing still for 2 s.
        ({"in_flight": 2, "kv_tokens": 150, "throughput": 50.0, "pause_s": 2.0}, {"room": room(v3=3)}, 600 - 150 - 100),
        # Prefilled at 10 ms a token: 150 tokens of KV are 1.5 s of 50 tokens/s.
        ({"in_flight": 2, "kv_tokens": 150, "throughput": 50.0, "prefill": (10, 0.1)}, {"room": room(v3=3)}, 600 - 75),
        # One group of 4 may still be reserved at version 2: only 2 more could start.
        ({"in_flight": 2}, {"room": room(v2=1, v3=3)}, 200),
        # All of it may be: nothing is won, the KV is lost.
        ({"in_flight": 2, "kv_tokens": 150}, {"room": room(v2=2, v3=3)}, -150),
        # A full instance wins nothing whatever there is to do.
        ({"in_flight": 8, "kv_tokens": 900}, {"room": room(v3=9), "waiting": {3: 9}}, -900),
        # 5 requests that only version 3 may serve, 1 that version 2 may as well: 6 against 1.
        ({"in_flight": 0}, {"waiting": {3: 5, 2: 1}}, 500),
        # No prompt left: room alone is worth nothing.
        ({"in_flight": 2, "kv_tokens": 150}, {"room": room(v3=3), "more_groups": False}, -150),
        # Nothing finished yet: no gain can be claimed.
        ({"in_flight": 2, "kv_tokens": 150}, {"room": room(v3=3), "mean_response_tokens": 0.0}, -150),
    ],
)
def test_the_estimate_by_hand(fields: dict[str, float], facts: dict[str, object], gain: float) -> None:
    view, now = behind(**fields), moment(**(WORTH | facts))
    assert gain_tokens(view, now, unclaimed_samples(now)) == gain
    for threshold in (0, max(gain, 0), max(gain - 1, 0)):  # a threshold is never negative
        settings = SyncSettings(
            method="status_based", indicator="hypothesis_test", threshold=threshold, check_req_before_sync=False
        )
        assert HypothesisTest(settings).choose([view], now) == [view] * (gain > threshold)


def test_no_more_instances_pull_than_there_is_work_for_the_cheapest_first() -> None:
    """8 samples to start at version 3, 4 of which `new` has places for. The other 4 go to `cheap`;
    `dear` would pull for nothing."""
    new = behind("new", version=3, in_flight=4)
    cheap, dear = behind("cheap", in_flight=2, kv_tokens=10), behind("dear", in_flight=2, kv_tokens=20)
    now = moment(instances=[new, dear, cheap], room=room(v3=2), **WORTH)
    settings = SyncSettings(method="status_based", indicator="hypothesis_test", threshold=0)
    assert HypothesisTest(settings).choose([dear, cheap], now) == [cheap]
    more = moment(instances=[new, dear, cheap], room=room(v3=3), **WORTH)  # 8 left: 6 for one, 2 for the other
    assert HypothesisTest(settings).choose([dear, cheap], more) == [cheap, dear]


def test_who_pulls_already_will_take_its_share() -> None:
    pulling = behind("pulling", pulling=3, in_flight=5)
    now = moment(instances=[pulling, behind("old", version=1)], room=room(v3=1), **WORTH)
    assert unclaimed_samples(now) == 4 - 3


# ---- who is behind ---------------------------------------------------------------------------------------------


def test_the_list_of_who_is_behind_follows_every_change() -> None:
    a, b, old = behind("a"), behind("b", version=3), behind("old", version=9, incarnation=0)
    lagging = Lagging()
    assert lagging.aim(3, 1, [a, b, old]) and not lagging.aim(3, 1, [])
    assert lagging.all() == [a, old]
    a.pulling = 3
    lagging.consider(a)
    assert lagging.all() == [old] and lagging.among(["a", "old", "unknown"]) == [old]
    a.pulling = -1  # it failed
    lagging.consider(a)
    lagging.forget("old")
    assert lagging.all() == [a]
    assert lagging.aim(4, 1, [a, b]) and len(lagging) == 2


def test_status_based_is_asked_about_one_by_one_and_hypothesis_test_about_all() -> None:
    assert not Greedy().whole_fleet and not StatusBased(SyncSettings()).whole_fleet
    assert HypothesisTest(SyncSettings()).whole_fleet
