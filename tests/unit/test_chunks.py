"""The chunk plan, and micro-batches that are planned while the buffer still fills; worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.protocol.control import TakenGroup
from psrl.protocol.samples import SampleRef
from psrl.trainer.chunks import Chunk, Part, plan_chunks, recorded_parts, whole
from psrl.trainer.step_plan import PlannedMini, PlanSettings, StepPlan

pytestmark = pytest.mark.unit


def taken(number: int, tokens: list[int], prompt_tokens: int = 1) -> TakenGroup:
    ref = SampleRef("s", 0, 1, 0, tokens, prompt_tokens)
    return TakenGroup(group=number, prompt=number, data_epoch=0, version=0, ref=ref)


@pytest.mark.parametrize(
    ("num_groups", "samples_per_group", "chunk", "expected"),
    [
        (4, 3, 12, [Chunk(4, 12)]),
        (4, 3, 6, [Chunk(2, 6), Chunk(4, 12)]),
        (4, 3, 9, [Chunk(3, 9), Chunk(4, 12)]),  # the last one is the remainder
        (4, 3, 4, [Chunk(2, 4), Chunk(3, 8), Chunk(4, 12)]),  # groups come whole, their samples in order
        (4, 3, 5, [Chunk(2, 5), Chunk(4, 10), Chunk(4, 12)]),  # the last one brings no new group
        (2, 4, 2, [Chunk(1, 2), Chunk(1, 4), Chunk(2, 6), Chunk(2, 8)]),
        (2, 4, 3, [Chunk(1, 3), Chunk(2, 6), Chunk(2, 8)]),
        (2, 1, 100, [Chunk(2, 2)]),
    ],
)
def test_chunks_by_hand(num_groups: int, samples_per_group: int, chunk: int, expected: list[Chunk]) -> None:
    assert plan_chunks(num_groups, samples_per_group, chunk) == expected


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_chunk_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_chunks(*sizes)


def shape(parts: list[Part]) -> list[tuple[list[int], int, bool]]:
    return [([group.group for group in part.groups], part.samples, part.last) for part in parts]


def test_parts_of_a_recorded_buffer_are_those_of_the_plan_also_if_it_is_short() -> None:
    groups = [taken(i, [5] * 3) for i in range(4)]
    plan = plan_chunks(4, 3, 4)
    assert shape(recorded_parts(groups, plan)) == [([0, 1], 4, False), ([2], 8, False), ([3], 12, True)]
    assert shape(recorded_parts(groups[:2], plan)) == [([0, 1], 4, False), ([], 6, True)]
    assert shape(recorded_parts(groups[:1], plan)) == [([0], 3, True)]
    assert shape(whole(groups)) == shape(recorded_parts(groups, [Chunk(4, 12)])) == [([0, 1, 2, 3], 12, True)]


COUNT = PlanSettings(mini_groups=2, least_valid=2, micro_samples=2, num_ranks=2, max_tokens=100, hidden_size=None)
TOKENS = replace(COUNT, micro_samples=None, max_tokens=10)


def planned(settings: PlanSettings, parts: list[Part]) -> list[list[tuple[int, list[list[list[int]]], bool]]]:
    """For each part: (mini-batch, [[samples of rank 0], [samples of rank 1]] of each micro-batch, complete)."""
    plan = StepPlan(settings)
    return [[as_samples(mini) for mini in extend(plan, part)] for part in parts]


def extend(plan: StepPlan, part: Part) -> list[PlannedMini]:
    tokens = [group.ref.tokens for group in part.groups]
    return plan.extend(tokens, [group.ref.prompt_tokens for group in part.groups], part.samples, part.last)


def as_samples(mini: PlannedMini) -> tuple[int, list[list[list[int]]], bool]:
    batches = [[[i for row in rank for i in row.samples] for rank in batch] for batch in mini.batches]
    return mini.number, batches, mini.complete


FIRST = [[0, 1], [2, 3]]
REST = [[4, 5], []]
SECOND = [[6, 7], [8, 9]]
SECOND_REST = [[10, 11], []]


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (12, [[(0, [FIRST, REST], True), (1, [SECOND, SECOND_REST], True)]]),
        (6, [[(0, [FIRST, REST], True)], [(1, [SECOND, SECOND_REST], True)]]),
        (4, [[(0, [FIRST], False)], [(0, [REST], True)], [(1, [SECOND, SECOND_REST], True)]]),
        (
            8,
            [
                [(0, [FIRST, REST], True)],  # samples 6, 7 wait for 8, 9
                [(1, [SECOND, SECOND_REST], True)],
            ],
        ),
        (3, [[], [(0, [FIRST, REST], True)], [], [(1, [SECOND, SECOND_REST], True)]]),
    ],
)
def test_micro_batches_of_a_fixed_size_do_not_depend_on_chunks(chunk: int, expected: list) -> None:
    groups = [taken(i, [5] * 3) for i in range(4)]
    assert planned(COUNT, recorded_parts(groups, plan_chunks(4, 3, chunk))) == expected


def test_a_buffer_that_ends_inside_a_mini_batch_completes_it() -> None:
    groups = [taken(i, [5] * 4) for i in range(3)]
    parts = [Part(groups[:2], 8, False), Part(groups[2:], 12, False), Part([], 12, True)]
    assert planned(COUNT, parts) == [
        [(0, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], True)],
        [(1, [[[8, 9], [10, 11]]], False)],
        [(1, [], True)],
    ]


def test_untrainable_samples_keep_their_place_but_have_no_row() -> None:
    groups = [taken(0, [5, 0, 5]), taken(1, [5, 0, 0])]  # one trainable sample is too few: group 1 is left out
    assert planned(COUNT, whole(groups)) == [[(0, [[[0], [2]]], True)]]
    assert planned(COUNT, whole([taken(0, [0] * 3), taken(1, [0] * 3)])) == [[(0, [], True)]]


def test_by_tokens_a_mini_batch_is_planned_when_it_is_whole() -> None:
    groups = [taken(i, [5] * 2) for i in range(4)]
    chunked = planned(TOKENS, recorded_parts(groups, plan_chunks(4, 2, 3)))
    first, second = (0, [[[0, 2], [1, 3]]], True), (1, [[[4, 6], [5, 7]]], True)
    assert chunked == [[], [first], [second]]
    assert planned(TOKENS, whole(groups)) == [[first, second]]


@pytest.mark.parametrize(("row_ranks", "sizes"), [(1, [1] * 4), (2, [2, 2]), (4, [1, 3]), (5, [4])])
def test_the_token_budget_counts_what_one_gpu_holds(row_ranks: int, sizes: list[int]) -> None:
    """Samples of 9 tokens, a budget of 10: where 2 ranks share a row each has 5 of it."""
    settings = replace(TOKENS, num_ranks=1, row_ranks=row_ranks)
    [[(_, batches, _)]] = planned(settings, whole([taken(i, [9] * 2) for i in range(2)]))
    assert sorted(len(batch[0]) for batch in batches) == sizes
    longest = [taken(i, [10 * row_ranks + extra] * 2) for i, extra in enumerate((0, 1))]
    assert planned(settings, whole(longest[:1]))
    with pytest.raises(ValueError, match="has 11 tokens on a GPU"):
        planned(settings, whole(longest))


def test_rows_that_share_prompts_stay_within_their_micro_batch() -> None:
    plan = StepPlan(replace(COUNT, micro_samples=4, num_ranks=1, hidden_size=64))
    (mini,) = extend(plan, whole([taken(i, [10] * 3, prompt_tokens=8) for i in range(2)])[0])
    assert [[row.samples for row in batch[0]] for batch in mini.batches] == [[(0, 1, 2), (3,)], [(4, 5)]]


@given(
    tokens=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=7),
    chunk=st.integers(1, 25),
    mini=st.integers(1, 8),
    micro=st.sampled_from([None, 1, 2, 3]),
    num_ranks=st.integers(1, 3),
)
def test_every_chunking_gives_the_same_micro_batches(
    tokens: list[list[int]], chunk: int, mini: int, micro: int | None, num_ranks: int
) -> None:
    settings = PlanSettings(
        mini_groups=mini, least_valid=2, micro_samples=micro, num_ranks=num_ranks, max_tokens=20, hidden_size=64
    )
    groups = [taken(i, sizes) for i, sizes in enumerate(tokens)]

    def batches(parts: list[Part]) -> tuple[dict[int, list], list[int]]:
        plan, found, complete = StepPlan(settings), {}, []
        for part in parts:
            for piece in extend(plan, part):
                found.setdefault(piece.number, []).extend(piece.batches)
                complete += [piece.number] if piece.complete else []
        return found, complete

    parts = recorded_parts(groups, plan_chunks(7, 3, chunk))
    assert batches(parts) == batches(whole(groups))
    found, complete = batches(parts)
    assert complete == list(range(-(-len(groups) // mini)))
    rows = [row for number in found for batch in found[number] for rank in batch for row in rank]
    valid = [i for g, sizes in enumerate(tokens) if sum(t > 0 for t in sizes) > 1 for i in range(3 * g, 3 * g + 3)]
    flat = [size for sizes in tokens for size in sizes]
    assert sorted(i for row in rows for i in row.samples) == [i for i in valid if flat[i] > 0]
