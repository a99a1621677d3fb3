"""The engine model's prefix cache, worked out by hand: blocks of ten tokens, steps of one second."""

from __future__ import annotations

import pytest

from psrl.protocol.cost_model import CostModel
from psrl.protocol.generation import CacheEvents
from psrl.simulate.costs import Costs
from psrl.simulate.engine import SimEngine
from psrl.simulate.prefix_cache import Blocks, PrefixCache
from psrl.simulate.samples import SimGroup, SimSample

pytestmark = pytest.mark.unit

ONE_SECOND = CostModel(
    other_threshold=1.0, other_latency_b=0.0, other_latency_k=0.0, attn_latency_b=0.0, attn_latency_k=0.0
)


def engine(*, kv: int = 10_000, shared: int = 0) -> SimEngine:
    return SimEngine(
        Costs(decode=ONE_SECOND), max_num_seqs=8, kv_capacity=kv, cache=PrefixCache(Blocks(10, shared_tokens=shared))
    )


def samples(number: int, *lengths: int, prompt: int = 40) -> list[SimSample]:
    group = SimGroup(number, "a", 0, number, 0, prompt, len(lengths))
    group.samples = [SimSample(group, i, length, length) for i, length in enumerate(lengths)]
    return group.samples


def turn(e: SimEngine, *given: SimSample) -> None:
    """All run together until each has ended its turn."""
    now_s = e.at_s
    for sample in given:
        e.submit(sample, now_s)
    while e.next_s is not None:
        e.wake(e.next_s)


def next_turn(sample: SimSample, length: int, added: int) -> SimSample:
    sample.turn_end, sample.added = sample.made + length, sample.added + added
    return sample


def test_blocks_are_shared_as_far_as_tokens_are() -> None:
    blocks = Blocks(10, shared_tokens=20)
    (one, twin), (other,) = samples(0, 5, 5, prompt=35), samples(1, 5, prompt=35)
    names = blocks.of_sample(one, 58)
    assert len(names) == 5  # two of all prompts, one of this one, two own; 8 tokens fill no block
    assert blocks.of_sample(one, 40) == names[:4]
    assert [a == b for a, b in zip(names, blocks.of_sample(twin, 58), strict=True)] == [True] * 3 + [False] * 2
    assert [a == b for a, b in zip(names, blocks.of_sample(other, 58), strict=True)] == [True] * 2 + [False] * 3
    assert blocks.of_prompt(0, 35) == names[:3]


def test_the_next_turn_computes_what_is_new() -> None:
    e = engine()
    (sample,) = samples(0, 15)
    turn(e, sample)
    assert (e.prompt_tokens, e.prefix_hit_tokens) == (40, 0)
    turn(e, next_turn(sample, 5, added=25))  # 55 of 80 tokens were there, 50 of them in whole blocks
    assert (e.prompt_tokens, e.prefix_hit_tokens) == (40 + 30, 50)


def test_samples_of_one_group_hold_their_prompt_once() -> None:
    e = engine()
    one, two = samples(0, 20, 20)
    e.submit(one, 0.0)
    e.submit(two, 0.0)
    e.wake(0.0)
    assert (e.prompt_tokens, e.prefix_hit_tokens) == (40 + 1, 39)  # the last token is computed in any case
    assert (e.kv_tokens, e.kv_held) == (80, 40)
    e.advance(10.0)
    assert (e.kv_tokens, e.kv_held) == (100, 60)
    assert e.stats().kv_tokens == 60


def test_all_prompts_share_what_they_begin_with() -> None:
    e = engine(shared=20)
    (one,), (two,) = samples(0, 5), samples(1, 5)
    turn(e, one)
    turn(e, two)
    assert (e.prompt_tokens, e.prefix_hit_tokens) == (60, 20)


def test_what_is_kept_gives_way_to_what_runs_its_end_first() -> None:
    e = engine(kv=100)
    (one,), (two,) = samples(0, 20), samples(1, 10)  # 60 tokens stay of the first, 40 + 10 are the second's
    turn(e, one)
    turn(e, two)
    assert e.prompt_tokens == 80
    turn(e, next_turn(one, 5, added=10))  # five of its six blocks are left
    assert (e.prompt_tokens, e.prefix_hit_tokens) == (80 + 20, 50)


def test_new_weights_empty_the_cache() -> None:
    e = engine()
    (sample,) = samples(0, 15)
    turn(e, sample)
    e.new_weights(1, e.at_s)
    turn(e, next_turn(sample, 5, added=5))
    assert (e.prompt_tokens, e.prefix_hit_tokens) == (40 + 60, 0)


def test_who_yields_finds_what_was_not_evicted() -> None:
    """Two samples fill the cache after 21 steps; the younger yields and comes back for what is left of it."""
    e = engine(kv=120)
    (old,), (young,) = samples(0, 30), samples(1, 30)
    turn(e, old, young)
    assert e.preemptions == 1 and (old.made, young.made) == (30, 30)
    assert e.prefix_hit_tokens > 0
    assert e.prompt_tokens + e.prefix_hit_tokens == 80 + 61


def test_a_prompt_that_runs_already_needs_no_room_of_its_own() -> None:
    e = engine(kv=100)
    one, two = samples(0, 3, 3, prompt=50)
    e.submit(one, 0.0)
    e.submit(two, 0.0)
    e.wake(0.0)
    assert len(e.running) == 2, "50 + 2 x 16 of headroom"


def test_news_are_what_changed_since_the_last_report() -> None:
    cache = PrefixCache(Blocks(10))
    cache.hold([1, 2])
    cache.release([1, 2, 3])
    assert cache.take_news() == CacheEvents(stored=[1, 2, 3])
    assert not cache.has_news
    cache.shrink(1)
    assert cache.take_news() == CacheEvents(removed=[3, 2])
    cache.hold([1, 2])
    cache.release([1, 2])
    cache.shrink(1)  # it came and went
    assert not cache.has_news
    cache.clear()
    cache.hold([7])
    assert cache.take_news() == CacheEvents(cleared=True, stored=[7])


@pytest.mark.parametrize("seed", range(5))
def test_who_follows_the_news_knows_what_is_there(seed: int) -> None:
    import random

    rng = random.Random(seed)
    cache, known, running = PrefixCache(Blocks(10)), set(), []
    for _ in range(300):
        chain = [100 * rng.randrange(6) + i for i in range(rng.randint(1, 6))]
        match rng.randrange(5):
            case 0 | 1:
                cache.hold(chain)
                running.append(chain)
            case 2 if running:
                cache.release(running.pop(rng.randrange(len(running))))
            case 3:
                cache.shrink(rng.randrange(12))
            case 4 if cache.has_news:
                news = cache.take_news()
                known = (set() if news.cleared else known) - set(news.removed) | set(news.stored)
                assert known == cache._held.keys() | cache._unused.keys()
        held = [name for chain in running for name in chain]
        assert cache.shared_blocks == len(held) - len(set(held))
        assert set(held) == cache._held.keys()
