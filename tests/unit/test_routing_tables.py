"""Each method on small fleets: the right choice is worked out by hand."""

from __future__ import annotations

import pytest
from routing_methods import QWEN_7B, fleet_of, place, view

from psrl.coordinator.lengths import LengthHistory
from psrl.coordinator.placing import PromptFacts, preferred, sample_blocks
from psrl.coordinator.routing.base import Work
from psrl.coordinator.routing.cache_aware import CacheAware
from psrl.coordinator.routing.cache_aware_v1 import CacheAwareV1
from psrl.coordinator.routing.cache_settings import CacheSettings
from psrl.coordinator.routing.prefixes import PrefixMemory
from psrl.coordinator.routing.random_choice import Random
from psrl.coordinator.routing.request_num_balance import RequestNumBalance
from psrl.coordinator.routing.round_robin import RoundRobin
from psrl.coordinator.routing.throughput_optimal import ThroughputOptimal, ThroughputOptimalWithBudget
from psrl.protocol.blocks import block_names
from psrl.protocol.cost_model import CostModel

pytestmark = pytest.mark.unit


# ---- request_num_balance, round_robin, random ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instances", "versions", "chosen"),
    [
        ([("a", 3, 0), ("b", 1, 0), ("c", 2, 0)], [0], "b"),
        ([("b", 1, 0), ("a", 1, 0)], [0], "a"),  # equal: by name
        ([("a", 1, 0), ("b", 1, 1)], [1, 0], "b"),  # equal: the preferred version
        ([("a", 1, 0), ("b", 1, 1)], [0, 1], "a"),
        ([("a", 1, 0), ("b", 2, 1)], [1, 0], "a"),  # fewer samples matter more than the version
        ([("a", 0, 0), ("b", 9, 1)], [1], "b"),
    ],
)
def test_request_num_balance(instances, versions, chosen) -> None:
    fleet = fleet_of(RequestNumBalance(), *(view(name, n, version=v) for name, n, v in instances))
    assert place(fleet, Work(), versions).name == chosen


def test_round_robin_goes_round_by_name_whatever_the_load() -> None:
    fleet = fleet_of(RoundRobin(), view("c"), a := view("a", 30), view("b"))
    assert [place(fleet, Work()).name for _ in range(5)] == ["a", "b", "c", "a", "b"]
    a.draining = True
    assert [place(fleet, Work()).name for _ in range(4)] == ["c", "b", "c", "b"]
    a.draining = False  # its turn is longest ago
    assert [place(fleet, Work()).name for _ in range(3)] == ["a", "c", "b"]
    fleet.add(view("d"))
    assert [place(fleet, Work()).name for _ in range(3)] == ["d", "a", "c"]


def test_random_draws_from_all_versions_alike() -> None:
    fleet = fleet_of(Random(1), *(view(f"i{k}", version=k % 2, room=10_000) for k in range(4)))
    for _ in range(4000):
        place(fleet, Work())
    assert all(900 < v.in_flight < 1100 for v in fleet._views.values())


# ---- throughput_optimal ----------------------------------------------------------------------------------------------

LINEAR = CostModel(
    other_threshold=1.0, other_latency_b=0.0, other_latency_k=0.5, attn_latency_b=0.0, attn_latency_k=0.01
)
"""A step of n sequences with kv tokens takes max(1, n / 2) + kv / 100 seconds."""


@pytest.mark.parametrize(
    ("instances", "tokens", "chosen"),
    [
        # Empty: 1 / (1 + 0.5) = 0.667. Two with 100 tokens: 3 / (1.5 + 1.5) - 2 / (1 + 1) = 0.
        ([("a", 2, 100), ("b", 0, 0)], 50, "b"),
        # Empty: 1 / 1.4 = 0.714. One with 0 tokens: 2 / 1.4 - 1 / 1 = 0.429. One with 100: 2 / 2.4 - 1 / 2 = 0.333, below half.
        ([("a", 1, 100), ("b", 1, 0)], 40, "b"),
        ([("a", 1, 100)], 40, None),
        # 0 tokens: empty 1. One with 100: 2 / 2 - 1 / 2 = 0.5, which is just enough.
        ([("a", 1, 100), ("b", 2, 0)], 0, "a"),  # b: 3 / 1.5 - 2 / 1 = 0, though its cache is empty
        ([("a", 2, 100), ("b", 2, 0)], 0, None),  # a: 3 / 2.5 - 2 / 2 = 0.2
    ],
)
def test_throughput_optimal(instances, tokens, chosen) -> None:
    views = [view(name, n, placed_tokens=float(kv)) for name, n, kv in instances]
    found = place(fleet_of(ThroughputOptimal(LINEAR, 0.5), *views), Work(tokens=tokens))
    assert (found.name if found else None) == chosen


def test_throughput_optimal_holds_nothing_back_that_has_waited_long_enough() -> None:
    fleet = fleet_of(ThroughputOptimal(LINEAR, 0.5), view("a", 3), view("b", 2))
    assert place(fleet, Work(tokens=50)) is None
    assert place(fleet, Work(tokens=50, may_wait=False)).name == "a"  # 4 / 2.5 - 2 = -0.4; b: 3 / 2 - 2 = -0.5


def test_throughput_optimal_counts_a_group_together_and_what_grew() -> None:
    """Qwen 7B, 8 samples of 1,000 tokens each, tokens a second: 845 at an empty instance, 756 beside 16 such samples, 169
    beside 64, and 186 beside 64 that have grown by 100,000: where attention dominates, one more sample costs less."""
    work = Work(8, tokens=1000.0)
    short, grown = (view(name, 64, room=512, placed_tokens=64_000.0) for name in "ab")
    fleet = fleet_of(ThroughputOptimal(QWEN_7B, 0.5), short, grown)
    assert place(fleet, work) is None
    assert fleet.choose(Work(8, tokens=1000.0, may_wait=False), 0, [0]) is short  # equal
    grown.grown_tokens = 100_000.0
    assert fleet.choose(Work(8, tokens=1000.0, may_wait=False), 0, [0]) is grown
    fleet.add(view("c", 16, room=512, placed_tokens=16_000.0))
    assert place(fleet, work).name == "c"


def test_a_share_of_one_takes_empty_instances_only_and_zero_any_gain() -> None:
    assert place(fleet_of(ThroughputOptimal(LINEAR, 1.0), view("a", 1), view("b")), Work(tokens=7.0)).name == "b"
    assert place(fleet_of(ThroughputOptimal(LINEAR, 1.0), view("a", 1)), Work(tokens=7.0)) is None
    assert place(fleet_of(ThroughputOptimal(LINEAR, 0.0), view("a", 1)), Work(tokens=7.0)).name == "a"


def test_the_budget_makes_a_request_as_heavy_as_it_will_become() -> None:
    """Gain at an instance with one sample and 20 tokens, at 0.01 s a token: without a budget 2 / 1.3 - 1 / 1.2 = 0.705
    against 1 / 1.1 = 0.909 when empty; with 90 more tokens expected 2 / 2.2 - 1 / 1.2 = 0.076 against 1 / 2 = 0.5."""
    work = Work(tokens=10.0, remaining=90.0)
    assert work.weight == 100.0
    fleet = fleet_of(ThroughputOptimalWithBudget(LINEAR, 0.5), view("a", 1, placed_tokens=20.0))
    assert place(fleet, work) is None
    fleet = fleet_of(ThroughputOptimal(LINEAR, 0.5), view("a", 1, placed_tokens=20.0))
    assert place(fleet, Work(tokens=10.0)).name == "a"


@pytest.mark.parametrize(
    ("prompt", "source", "so_far", "expected"),
    [
        (1, "math", 0, 500),  # (400 + 600) / 2 of the same prompt
        (1, "math", 450, 50),
        (1, "math", 900, 0),
        (2, "math", 100, 300),  # (400 + 600 + 200) / 3 of the source, 100 of them made
        (3, "code", 100, 924),  # the budget
    ],
)
def test_expected_lengths_come_from_the_prompt_then_the_source_then_the_budget(
    prompt, source, so_far, expected
) -> None:
    lengths = LengthHistory(budget=1024)
    lengths.note(prompt=1, data_source="math", tokens=1000, samples=2)
    lengths.note(prompt=9, data_source="math", tokens=200, samples=1)
    assert lengths.remaining(prompt=prompt, data_source=source, so_far=so_far) == expected


# ---- cache_aware -----------------------------------------------------------------------------------------------------

LONG = tuple(range(1, 11))
"""Ten blocks of 16 tokens."""


def remembering(router, instances, cached):
    """A fleet where `cached` says which blocks each instance has seen."""
    fleet = fleet_of(router, *(view(name, n, kv_usage=usage) for name, n, usage in instances))
    fleet.versions(0)
    by_name = fleet._views
    for name, blocks in cached.items():
        router.placed(by_name[name], Work(tokens=0.0, blocks=blocks))
    return fleet


@pytest.mark.parametrize(
    ("instances", "cached", "settings", "chosen"),
    [
        ([("a", 5, 0), ("b", 9, 0)], {"b": LONG}, {}, "b"),  # cached
        ([("a", 5, 0), ("b", 9, 0)], {}, {}, "a"),  # not cached: least busy
        ([("a", 5, 0), ("b", 9, 0), ("c", 6, 0)], {"b": LONG, "c": LONG}, {}, "c"),  # both: less busy
        ([("a", 5, 0), ("b", 9, 0), ("c", 6, 0)], {"b": LONG, "c": LONG[:9]}, {}, "b"),  # the longest
        ([("a", 4, 0), ("b", 20, 0)], {"b": LONG}, {}, "a"),  # 16 more and 5 times as many: uneven
        ([("a", 4, 0), ("b", 19, 0)], {"b": LONG}, {}, "b"),  # 15 more
        ([("a", 33, 0), ("b", 49, 0)], {"b": LONG}, {}, "b"),  # 16 more, but only 1.48 times as many
        ([("a", 5, 0), ("b", 9, 0)], {"b": LONG[:4]}, {"cache_threshold": 0.5}, "a"),  # 64 of 160 tokens are 40%
        ([("a", 5, 0), ("b", 9, 0)], {"b": LONG[:5]}, {"cache_threshold": 0.5}, "b"),  # 80 of 160 are enough
        ([("a", 5, 0), ("b", 9, 0.8)], {"b": LONG}, {}, "a"),  # too full
        ([("a", 5, 0.9), ("b", 9, 0.5)], {}, {}, "b"),  # the least busy is too full
        ([("a", 5, 0.9), ("b", 9, 0.8)], {}, {}, "a"),  # all are
        ([("a", 5, 1.0), ("b", 9, 0.9)], {"a": LONG}, {}, "b"),  # overloaded
        ([("a", 5, 1.0), ("b", 9, 1.0)], {}, {}, "a"),
    ],
)  # fmt: skip
def test_cache_aware(instances, cached, settings, chosen) -> None:
    fleet = remembering(CacheAware(CacheSettings(**settings)), instances, cached)
    assert place(fleet, Work(tokens=160.0, blocks=LONG)).name == chosen


@pytest.mark.parametrize(
    ("kv", "cached", "weights", "chosen"),
    [
        ({"a": 100, "b": 200}, {"b": LONG}, (1.0, 0.0), "b"),  # 200 - 160 < 100
        ({"a": 100, "b": 300}, {"b": LONG}, (1.0, 0.0), "a"),  # 300 - 160 > 100
        ({"a": 100, "b": 300}, {"b": LONG}, (1.5, 0.0), "b"),  # 300 - 240 < 100
        ({"a": 100, "b": 200}, {"b": LONG[:6]}, (1.0, 0.0), "a"),  # 200 - 96 > 100
        ({"a": 100, "b": 200, "c": 160}, {"b": LONG, "c": LONG[:8]}, (1.0, 0.0), "c"),  # 100, 40, 32
        ({"a": 100, "b": 100}, {"b": LONG}, (0.0, 0.0), "a"),
    ],
)
def test_cache_aware_v1_weighs_what_is_cached_against_what_is_there(kv, cached, weights, chosen) -> None:
    router = CacheAwareV1(CacheSettings(gpu_weight=weights[0], offload_weight=weights[1]))
    fleet = remembering(router, [(name, 5, 0.0) for name in kv], cached)
    for name, tokens in kv.items():
        fleet._views[name].placed_tokens = float(tokens)
    assert place(fleet, Work(tokens=160.0, blocks=LONG)).name == chosen


@pytest.mark.parametrize(("offload_weight", "chosen"), [(0.0, "a"), (0.5, "b")])
def test_cache_aware_v1_counts_what_fell_out_of_the_cache_by_the_offload_weight(offload_weight, chosen) -> None:
    """A cache of 160 tokens: the second request pushes the first out. 170 - 0.5 x 160 < 100 < 170."""
    router = CacheAwareV1(CacheSettings(offload_weight=offload_weight, max_capacities=3.0))
    one, two = view("a", 5, placed_tokens=100.0), view("b", 5, placed_tokens=170.0)
    two.stats.kv_capacity_tokens = 160
    fleet = fleet_of(router, one, two)
    fleet.versions(0)
    router.placed(two, Work(blocks=LONG))
    router.placed(two, Work(blocks=tuple(range(101, 111))))
    assert place(fleet, Work(tokens=160.0, blocks=LONG)).name == chosen


def test_new_weights_clear_what_is_remembered_and_a_moved_sample_is() -> None:
    router = CacheAware(CacheSettings())
    fleet = remembering(router, [("a", 5, 0), ("b", 9, 0)], {"b": LONG})
    fleet._views["b"].version = 1
    fleet._views["a"].version = 1
    assert place(fleet, Work(tokens=160.0, blocks=LONG)).name == "a"
    router.left_behind(fleet._views["b"], Work(blocks=(51, 52)))
    assert place(fleet, Work(tokens=160.0, blocks=(51, 52, 53))).name == "b"


def test_memory_forgets_the_longest_unused_and_ends_before_beginnings() -> None:
    memory = PrefixMemory()
    memory.remember(0, [1, 2, 3])
    memory.remember(0, [1, 7])
    assert memory.trim(0, 3) == [3] and memory.trim(0, 2) == [2]
    assert list(memory.longest_first([1, 7, 8])) == [(2, {0})]
    assert list(memory.longest_first([1, 2, 3])) == [(1, {0})]
    memory.forget(0)
    assert list(memory.longest_first([1])) == [] and memory.size(0) == 0


def test_memory_is_trimmed_in_time_and_bounded_at_all_times() -> None:
    router = CacheAware(CacheSettings(max_tokens=160, tidy_interval_s=60.0))
    fleet = remembering(router, [("a", 0, 0)], {})
    one = fleet._views["a"]
    for k in range(9):
        router.placed(one, Work(blocks=tuple(range(100 * k, 100 * k + 4))))
        assert router._cached.size(0) <= 20
    router.tidy(100.0)
    assert router._cached.size(0) == 10
    router.placed(one, Work(blocks=tuple(range(2000, 2004))))
    router.tidy(159.0)
    assert router._cached.size(0) == 14
    router.tidy(160.0)
    assert router._cached.size(0) == 10


# ---- around routing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "room", "order"),
    [
        ("version", {3: 9, 4: 5, 5: 1}, [5, 4, 3]),
        ("reserve_capability", {3: 9, 4: 5, 5: 1}, [3, 4, 5]),
        ("reserve_capability", {3: 2, 4: 2, 5: 2}, [5, 4, 3]),
    ],
)
def test_which_weights_new_groups_prefer(candidates, room, order) -> None:
    assert preferred([4, 3, 5], candidates, room.__getitem__) == order


def test_two_prompts_share_the_names_of_what_they_begin_with_alike() -> None:
    def names(*tokens: int) -> tuple[int, ...]:
        return tuple(block_names(tokens, 2))

    long = names(1, 2, 3, 4, 5)
    assert len(long) == 2 and names(1, 2, 3, 4) == long and names(1, 2) == long[:1] and names(1) == ()
    other = names(9, 2, 3, 4)
    assert not {*other} & {*long}  # the second block is alike, but not what comes before it
    assert names(1, 2, 3, 9)[0] == long[0] and names(1, 2, 3, 9)[1] != long[1]
    assert block_names([1], 2) == []


def test_own_blocks_follow_those_of_the_prompt_and_are_nobody_elses() -> None:
    prompt = PromptFacts(tokens=40, data_source="", blocks=(11, 12))
    first = sample_blocks(prompt, 16, group=1, sample=0, response_tokens=30)
    assert first[:2] == (11, 12) and len(first) == 4
    assert len(sample_blocks(prompt, 16, 1, 0, 7)) == 2 and sample_blocks(prompt, 16, 1, 0, 24) == first
    assert not {*first[2:]} & {*sample_blocks(prompt, 16, 1, 1, 30)[2:], *sample_blocks(prompt, 16, 2, 0, 30)[2:]}
