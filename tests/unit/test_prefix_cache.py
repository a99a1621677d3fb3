"""The prefix cache without tensors: what is kept, what goes first, what a listener hears, what vLLM's events mean."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psrl.protocol.blocks import block_names
from psrl.protocol.generation import CacheEvents, SamplingParams
from psrl.rollout.engines.prefix_cache import PrefixCache
from psrl.rollout.engines.scheduler import Departures, Scheduler, Sequence
from psrl.rollout.engines.vllm_blocks import VllmBlocks, names_blocks_of
from psrl.rollout.engines.vllm_events import REPLAY_TIMEOUT_S, InOrder
from psrl.rollout.held_blocks import HeldBlocks

pytestmark = pytest.mark.unit

A, B = [10, 11, 12], [10, 21, 22]
"""Two chains of blocks that share the first."""


def test_the_end_of_the_least_recently_used_chain_goes_first() -> None:
    cache = PrefixCache(4)
    cache.keep(A, room=9)
    cache.keep(B, room=9)
    assert cache.hit(A) == [0, 1, 2]  # so B's own blocks are the older ones now
    gone = []
    for room in (4, 3, 2, 1, 0):
        before = set(A + B) - set(gone)
        cache.shrink(room)
        gone += [name for name in before if not cache.cached([name])]
    assert gone == [22, 21, 12, 11, 10]


def test_a_sequence_that_leaves_makes_others_yield_but_not_its_own_beginning() -> None:
    cache = PrefixCache(4)
    cache.keep(B, room=3)
    assert cache.keep(A, room=3) == (1, [1, 2]), "slots of what made way are used again"
    assert [cache.cached(A), cache.cached(B)] == [3, 1]
    assert cache.keep([30, 31, 32, 33], room=2) == (0, [0, 1])
    assert [cache.cached(A), cache.cached([30, 31])] == [0, 2]
    assert cache.keep([40], room=0) == (0, []) and len(cache) == 0
    assert cache.keep([40], room=-1) == (0, [])


class Walk(RuleBasedStateMachine):
    """Sequences come, decode, end, are aborted, preempted and cached; rows and slots are lists of tokens that are copied exactly
    as told. Whatever happens, what a hit copies is what the sequence would have computed."""

    @initialize(size=st.sampled_from([1, 2, 3, 5]), tokens=st.integers(24, 90), rows=st.integers(1, 5))
    def start(self, size: int, tokens: int, rows: int) -> None:
        self.size, self.tokens, self.made = size, tokens, 0
        self.scheduler = Scheduler(max_num_seqs=rows, kv_cache_tokens=tokens, block_size=size)
        self.rows: dict[int, list[int]] = {}
        self.slots: dict[int, list[int]] = {}
        self.left: list[tuple[int, Sequence]] = []
        self.told: set[int] = set()

    @property
    def cache(self) -> PrefixCache:
        assert self.scheduler.cache is not None
        return self.scheduler.cache

    @rule(
        start=st.lists(st.integers(0, 1), min_size=1, max_size=12), group=st.integers(0, 2), budget=st.integers(1, 12)
    )
    def submit(self, start: list[int], group: int, budget: int) -> None:
        self.made += 1
        ids = tuple(start)
        self.scheduler.add(
            Sequence(
                order=self.made, group=group, sample=0, prompt_ids=ids, token_ids=list(ids), budget=budget, seed=0,
                sampling=SamplingParams(), stop_ids=frozenset(),
            )
        )  # fmt: skip

    def keep(self) -> None:
        for row, first, slots in self.scheduler.keep(self.left):
            for number, slot in enumerate(slots, first):
                self.slots[slot] = self.rows[row][number * self.size : (number + 1) * self.size]
                assert len(self.slots[slot]) == self.size
        self.left.clear()

    def depart(self, departures: Departures) -> None:
        self.left += departures.left
        if departures.moves:
            self.keep()
        for source, hole in departures.moves:
            self.rows[hole] = self.rows[source]

    @rule(ends=st.sets(st.integers(0, 4)), token=st.integers(0, 1), prefill=st.integers(1, 30))
    def step(self, ends: set[int], token: int, prefill: int) -> None:
        self.depart(self.scheduler.preempt())
        self.keep()
        admissions, more = self.scheduler.admit(prefill)
        for a in admissions:
            if a.donor_row is not None:
                self.rows[a.row] = list(self.rows[a.donor_row][: len(a.sequence.prompt_ids) - 1])
            else:
                self.rows[a.row] = [t for slot in a.cached for t in self.slots[slot]]
                assert len(self.rows[a.row]) == a.num_cached < len(a.sequence.token_ids)
                assert a.num_cached + a.num_to_prefill == len(a.sequence.token_ids) - 1
                self.rows[a.row] += a.sequence.token_ids[a.num_cached : -1]
            assert self.rows[a.row] == a.sequence.token_ids[:-1]
        if more:
            return
        finished = set()
        for row, sequence in enumerate(self.scheduler.running):
            assert self.rows[row] == sequence.token_ids[:-1]
            self.rows[row] = list(sequence.token_ids)
            sequence.token_ids.append(token)
            sequence.num_new += 1
            if row in ends or not sequence.remaining:
                finished.add(row)
        self.scheduler.grow()
        self.depart(self.scheduler.release(finished))

    @rule(group=st.sampled_from([None, 0, 1]))
    def abort(self, group: int | None) -> None:
        self.depart(self.scheduler.abort(None if group is None else [group])[1])

    @precondition(lambda self: self.made % 4 == 3)
    @rule()
    def new_weights(self) -> None:
        self.left.clear()
        self.slots.clear()
        self.scheduler.forget_kv()
        assert len(self.cache) == 0

    @rule()
    def tell(self) -> None:
        events = self.cache.held.news() or CacheEvents()
        if events.cleared:
            self.told.clear()
        assert self.told.issuperset(events.removed)
        self.told.difference_update(events.removed)
        assert self.told.isdisjoint(events.stored)
        self.told.update(events.stored)
        assert self.told == set(self.cache._slots)

    @invariant()
    def nothing_is_over_capacity_and_no_slot_is_lost(self) -> None:
        cache, scheduler = self.cache, self.scheduler
        running = sum(len(s.token_ids) for s in scheduler.running)
        assert scheduler.kv_tokens == running
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert len(cache) * self.size <= max(0, self.tokens - running)
        used = list(cache._slots.values())
        assert len(set(used)) == len(used) and set(used).isdisjoint(cache._free)
        assert sorted(used + cache._free) == list(range(len(used) + len(cache._free)))

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.tell()


Walk.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestWalk = Walk.TestCase


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 6), st.booleans()), max_size=30
    )
)
def test_a_beginning_outlives_what_follows_it(steps: list[tuple[list[int], int, bool]]) -> None:
    cache, last_use = PrefixCache(1), dict[int, int]()
    for now, (ids, room, leaves) in enumerate(steps):
        names = block_names(ids, 1)
        if leaves:
            cache.keep(names, room)
            used = names[:room]
        else:
            used = names[: len(cache.hit(names))]
        last_use |= dict.fromkeys(used, now)
        cache.shrink(room)
        order = list(cache._slots)
        assert [last_use[n] for n in order] == sorted(last_use[n] for n in order), "least recently used first"
        for ids_seen, _, _ in steps[: now + 1]:
            chain = [name in cache._slots for name in block_names(ids_seen, 1)]
            assert all(before or not after for before, after in pairwise(chain)), "a block without the one before it"


# ---- what a listener hears ---------------------------------------------------------------------------------------

CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(st.integers(1, 9), max_size=4)),
        st.tuples(st.just("remove"), st.lists(st.integers(1, 9), max_size=4)),
        st.just(("clear", [])),
        st.just(("forget_listener", [])),
        st.tuples(st.just("news"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(CHANGES)
def test_a_listener_knows_what_is_held_once_it_has_heard_all(changes: list[tuple[str, list[int] | int]]) -> None:
    blocks, relay, known, truth = HeldBlocks(), HeldBlocks(), set[int](), set[int]()

    def hear(most: int) -> None:
        events = blocks.news(most)
        if events is not None:
            assert 0 < len(events.removed) + len(events.stored) <= most or events.cleared
            relay.apply(events)
            if events.cleared:
                known.clear()
            known.difference_update(events.removed)
            known.update(events.stored)

    for what, value in changes:
        match what, value:
            case "store", list():
                blocks.store(value)
                truth.update(value)
            case "remove", list():
                blocks.remove(value)
                truth.difference_update(value)
            case "clear", _:
                blocks.clear()
                truth.clear()
            case "forget_listener", _:
                blocks.forget_listener()
                known.clear()
                known.update({1, 99})  # whoever listens now may believe anything
            case "news", int():
                hear(value)
    while blocks.has_news:
        hear(3)
    assert blocks.news() is None
    assert {name for name in range(1, 10) if name in blocks} == truth == {n for n in range(1, 10) if n in relay}
    assert known == truth


def test_what_follows_comes_after_what_it_follows_also_when_all_is_told_anew() -> None:
    blocks = HeldBlocks()
    blocks.store(A)
    blocks.remove([12, 11])
    blocks.store([11, 12])
    blocks.store(B)
    assert blocks.news() == CacheEvents(stored=[10, 11, 12, 21, 22])
    blocks.forget_listener()
    assert [blocks.news(2), blocks.news(2), blocks.news(2), blocks.news(2)] == [
        CacheEvents(cleared=True, stored=[10, 11]),
        CacheEvents(stored=[12, 21]),
        CacheEvents(stored=[22]),
        None,
    ]
    blocks.clear()
    blocks.store([10])
    assert blocks.news() == CacheEvents(cleared=True, stored=[10])


# ---- vLLM's events -----------------------------------------------------------------------------------------------


def stored(hashes: str, parent: str | None, ids: list[int], size: int, **more: object) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [h.encode() for h in hashes],
        "parent_block_hash": parent and parent.encode(),
        "token_ids": ids,
        "block_size": size,
        "medium": "GPU",
    } | more


def removed(hashes: str, **more: object) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [h.encode() for h in hashes], "medium": "GPU"} | more


IDS = list(range(100, 116))
NAMES = block_names(IDS, 2)


def heard(*events: object) -> VllmBlocks:
    blocks = VllmBlocks(2)
    for event in events:
        blocks.hear(event)  # type: ignore[arg-type]
    return blocks


@pytest.mark.parametrize(
    ("events", "held"),
    [
        ([stored("ab", None, IDS[:8], 4), stored("cd", "b", IDS[8:], 4)], NAMES),
        ([["BlockStored", [b"a"], None, IDS[:4], 4, None, "GPU"], ["BlockRemoved", [b"a"], "GPU"]], []),
        ([["BlockStored", [7, 8], None, IDS[:8], 4], ["BlockRemoved", [8]]], NAMES[:2]),
        ([stored("ab", None, IDS[:8], 4), removed("b")], NAMES[:2]),
        ([stored("a", None, IDS[:4], 4), stored("a", None, IDS[:4], 4), removed("a")], NAMES[:2]),  # in two blocks of vLLM's
        ([stored("ab", None, IDS[:8], 4), removed("x"), {"type": "AllBlocksCleared"}], []),
        ([stored("ab", None, IDS[:8], 4), removed("ab", medium="CPU")], NAMES[:4]),  # of an offload tier
        ([stored("ab", None, IDS[:8], 4, medium="CPU")], []),
        ([stored("ab", None, IDS[:8], 4, group_idx=1)], []),  # of another kind of layer
        ([stored("a", None, IDS[:8], 4)], []),  # not each block has a hash
        ([stored("a", None, IDS[:3], 3), stored("b", "a", IDS[3:6], 3)], []),  # no whole number of our blocks
        ([stored("c", "b", IDS[8:12], 4)], []),  # follows what nobody has heard of
        ([["SomethingNew", 5], {"type": "AnotherOne"}], []),
    ],
)  # fmt: skip
def test_what_vllm_says_in_our_names(events: list[object], held: list[int]) -> None:
    blocks = heard(*events)
    assert len(blocks.held) == len(held) and all(name in blocks.held for name in held)


def test_after_a_loss_what_is_used_is_known_again() -> None:
    blocks = heard(stored("abc", None, IDS[:12], 4), stored("x", None, [1, 2, 3, 4], 4))
    blocks.held.news()
    blocks.lose()
    assert blocks.held.news() == CacheEvents(cleared=True)
    blocks.hear(stored("d", "c", IDS[12:], 4))
    assert blocks.held.news() == CacheEvents(stored=NAMES), "and what it follows, from the first block on"
    blocks.hear(removed("d"))
    assert blocks.held.news() == CacheEvents(removed=NAMES[6:])


def test_blocks_that_are_no_whole_number_of_ours_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert names_blocks_of(128, 16) and not caplog.records
    assert not names_blocks_of(16, 48)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "blocks of 16 tokens" in caplog.text


def batches(*numbers: int) -> list[tuple[int, bytes]]:
    return [(n, b"%d" % n) for n in numbers]


@pytest.mark.parametrize(
    ("arrive", "answered", "after_s", "taken"),
    [
        ([0, 1, 2], False, 0.0, [0, 1, 2]),
        ([1, 2], False, 0.0, []),
        ([1, 2, 0], False, 0.0, [0, 1, 2]),
        ([0, 2, 4], False, REPLAY_TIMEOUT_S - 0.1, [0]),
        ([0, 2, 4], False, REPLAY_TIMEOUT_S, [0, None, 2]),
        ([3], True, 0.0, [None, 3]),
        ([0, 0, 1, 0], False, 0.0, [0, 1]),
    ],
)
def test_batches_come_in_order_or_are_said_to_be_lost(
    arrive: list[int], answered: bool, after_s: float, taken: list[int | None]
) -> None:
    order, found = InOrder(), list[bytes | None]()
    for number, batch in batches(*arrive):
        order.put(number, batch)
    found += order.take(50.0)
    if answered:
        order.no_more()
    found += order.take(50.0 + after_s)
    assert [None if b is None else int(b) for b in found] == taken
