"""The engine's scheduler: rows, the token budget, preemption. Tables, then random walks against the invariants."""

from __future__ import annotations

import random

import pytest

from psrl.protocol.generation import SamplingParams
from psrl.rollout.engines.scheduler import Admission, Move, Scheduler, Sequence, compaction_moves

pytestmark = pytest.mark.unit

UNLIMITED = 10**9


def make(order: int, *, group: int = -1, prompt: int = 4, done: int = 0, budget: int = 1000) -> Sequence:
    prompt_ids = tuple(range(prompt))
    return Sequence(
        order=order,
        group=order if group < 0 else group,
        sample=order,
        prompt_ids=prompt_ids,
        token_ids=[*prompt_ids, *range(done)],
        budget=budget,
        seed=0,
        sampling=SamplingParams(),
        stop_ids=frozenset(),
    )


def filled(*sequences: Sequence, rows: int = 8, tokens: int = UNLIMITED) -> Scheduler:
    scheduler = Scheduler(max_num_seqs=rows, kv_cache_tokens=tokens)
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


def orders(admissions: list[Admission]) -> list[int]:
    return [a.sequence.order for a in admissions]


@pytest.mark.parametrize(
    ("num_rows", "freed", "moves"),
    [
        (4, {1}, [(3, 1)]),
        (4, {3}, []),
        (4, {0, 3}, [(2, 0)]),
        (5, {0, 1}, [(3, 0), (4, 1)]),
        (3, {0, 1, 2}, []),
        (1, {0}, []),
    ],
)
def test_compaction(num_rows: int, freed: set[int], moves: list[Move]) -> None:
    assert compaction_moves(num_rows, freed) == moves


def test_admission_is_first_come_first_served_up_to_the_rows() -> None:
    scheduler = filled(*(make(i) for i in range(5)), rows=3)
    admissions, more = scheduler.admit(UNLIMITED)
    assert [(a.sequence.order, a.row) for a in admissions] == [(0, 0), (1, 1), (2, 2)]
    assert not more  # rows are the limit, not the prefill budget
    assert [s.order for s in scheduler.waiting] == [3, 4]


def test_the_prefill_budget_splits_admission_and_says_so() -> None:
    scheduler = filled(make(0, prompt=50), make(1, prompt=5), make(2, prompt=5))
    assert [(orders(a), more) for a, more in (scheduler.admit(8), scheduler.admit(8))] == [([0], True), ([1, 2], False)]


def test_samples_of_one_prompt_borrow_one_prefill() -> None:
    scheduler = filled(make(0, group=7), make(1, group=7), make(2, group=7, done=3), make(3, group=8), make(4, group=7))
    admissions, _ = scheduler.admit(UNLIMITED)
    # 2 goes on after tokens of its own and 3 is another group: both prefill.
    assert [a.donor_row for a in admissions] == [None, 0, None, None, 0]


def test_a_late_sample_borrows_from_a_running_one_unless_the_prompt_differs() -> None:
    scheduler = filled(make(0, group=7))
    scheduler.admit(UNLIMITED)
    scheduler.add(make(1, group=7))
    scheduler.add(make(2, group=7, prompt=6))
    admissions, _ = scheduler.admit(UNLIMITED)
    assert [a.donor_row for a in admissions] == [0, None]


def test_admission_leaves_room_for_growth_but_never_starves_an_empty_engine() -> None:
    scheduler = filled(make(0, prompt=10), make(1, prompt=10), make(2, prompt=10), tokens=60)
    assert orders(scheduler.admit(UNLIMITED)[0]) == [0, 1]  # each counts 10 + 16; a third would make 78
    scheduler = filled(make(0, prompt=60), make(1, prompt=2), tokens=60)
    assert orders(scheduler.admit(UNLIMITED)[0]) == [0]
    scheduler = filled(*(make(i, prompt=10, budget=2) for i in range(6)), tokens=60)
    assert orders(scheduler.admit(UNLIMITED)[0]) == [0, 1, 2, 3, 4]  # short ones grow by 2 at most


def test_the_youngest_yields_and_comes_back_first() -> None:
    scheduler = filled(*(make(i, prompt=10, budget=1) for i in range(4)), tokens=44)
    scheduler.admit(UNLIMITED)
    scheduler.add(make(9))
    for sequence in scheduler.running:
        sequence.token_ids += [1, 1]
    scheduler.grow()
    scheduler.grow()
    assert scheduler.kv_tokens == 48
    assert scheduler.preempt().moves == []  # the last row needs no move
    assert [s.order for s in scheduler.running] == [0, 1, 2]
    assert [s.order for s in scheduler.waiting] == [3, 9]
    assert (scheduler.kv_tokens, scheduler.preemptions) == (36, 1)


def test_only_what_waits_is_forgotten_when_it_is_handed_back() -> None:
    scheduler = filled(*(make(i) for i in range(5)), rows=3)
    scheduler.admit(UNLIMITED)
    tokens = scheduler.kv_tokens
    assert [s.order for s in scheduler.abort_waiting()] == [3, 4] and not scheduler.waiting
    assert [s.order for s in scheduler.running] == [0, 1, 2] and scheduler.kv_tokens == tokens


def test_a_lone_sequence_is_never_preempted() -> None:
    scheduler = filled(make(0, prompt=10), tokens=10)
    scheduler.admit(UNLIMITED)
    scheduler.running[0].token_ids.append(1)
    scheduler.grow()
    assert scheduler.preempt() == ([], [])
    assert len(scheduler.running) == 1


def test_void_kv_sends_all_back_in_order_of_arrival_ahead_of_the_others() -> None:
    scheduler = filled(*(make(i) for i in range(5)), rows=3)
    scheduler.admit(UNLIMITED)
    scheduler.release({0})  # row 0 now holds the third arrival
    scheduler.forget_kv()
    assert [s.order for s in scheduler.waiting] == [1, 2, 3, 4]
    assert (scheduler.running, scheduler.kv_tokens, scheduler.preemptions) == ([], 0, 0)


@pytest.mark.parametrize(
    ("groups", "dropped", "running", "waiting"),
    [
        ((0, 4), [0, 4], [2, 1], [3]),
        ((9,), [], [0, 1, 2], [3, 4]),
        (None, [0, 1, 2, 3, 4], [], []),
        ((), [], [0, 1, 2], [3, 4]),
    ],
)
def test_abort_takes_running_and_waiting(
    groups: tuple[int, ...] | None, dropped: list[int], running: list[int], waiting: list[int]
) -> None:
    scheduler = filled(*(make(i) for i in range(5)), rows=3)
    scheduler.admit(UNLIMITED)
    assert [s.order for s in scheduler.abort(groups)[0]] == dropped
    assert [s.order for s in scheduler.running] == running
    assert [s.order for s in scheduler.waiting] == waiting


def test_single_samples_can_be_aborted() -> None:
    scheduler = filled(*(make(i) for i in range(5)), rows=3)
    scheduler.admit(UNLIMITED)
    keys = {(s.group, s.sample) for s in (scheduler.running[1], scheduler.waiting[1])}
    assert [s.order for s in scheduler.abort_samples(keys)[0]] == [1, 4]
    assert [s.order for s in scheduler.running] == [0, 2] and [s.order for s in scheduler.waiting] == [3]


@pytest.mark.parametrize("seed", range(20))
def test_random_walk_keeps_rows_budget_and_kv_consistent(seed: int) -> None:
    """A shadow KV store is moved exactly as told; each row must always hold its own sequence's tokens but the last."""
    rng = random.Random(seed)
    scheduler = filled(rows=6, tokens=80)
    rows: dict[int, list[int]] = {}
    made = finished = aborted = 0

    def move(moves: list[Move]) -> None:
        for source, hole in moves:
            rows[hole] = rows[source]

    for _ in range(300):
        for _ in range(rng.randrange(3)):
            group = rng.randrange(4)
            sequence = make(made, group=group, prompt=group + 2, budget=rng.randrange(1, 30))
            sequence.prompt_ids = tuple(100 * group + i for i in range(group + 2))
            sequence.token_ids = [*sequence.prompt_ids, *range(rng.choice([0, 0, 5]))]
            scheduler.add(sequence)
            made += 1
        if rng.random() < 0.05:
            groups = [rng.randrange(4)]
            dropped, departures = scheduler.abort(groups)
            aborted += len(dropped)
            assert all(s.group in groups for s in dropped)
            move(departures.moves)
        if rng.random() < 0.03:
            scheduler.forget_kv()
        move(scheduler.preempt().moves)
        admissions, more = scheduler.admit(20)
        for a in admissions:
            if a.donor_row is None:
                rows[a.row] = a.sequence.token_ids[:-1]
            else:
                rows[a.row] = rows[a.donor_row][: len(a.sequence.prompt_ids) - 1]
        if more:
            continue
        assert scheduler.running or not scheduler.waiting
        assert len(scheduler.running) <= 6
        assert scheduler.kv_tokens == sum(len(s.token_ids) for s in scheduler.running) <= 80
        ends = set()
        for row, sequence in enumerate(scheduler.running):
            assert rows[row] == sequence.token_ids[:-1]
            rows[row] = list(sequence.token_ids)
            sequence.token_ids.append(rng.randrange(1000))
            sequence.num_new += 1
            if not sequence.remaining or rng.random() < 0.1:
                ends.add(row)
        scheduler.grow()
        finished += len(ends)
        move(scheduler.release(ends).moves)
    assert made == finished + aborted + len(scheduler.running) + len(scheduler.waiting)
    assert finished > 20
