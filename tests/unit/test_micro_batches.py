"""The micro-batch plan (cap, balance, equal counts, each sample once) and the tensors built from it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psrl.algorithms.advantages import AdvantageOptions, grpo
from psrl.protocol.samples import Group, Sample
from psrl.trainer.batch import (
    build_micro_batches,
    count_loss_tokens,
    groups_needed,
    index_samples,
    rewards_of,
    sample_rewards,
)
from psrl.trainer.micro_batches import (
    TOKEN_LIMIT_KEY,
    plan_micro_batches,
    trainable_lengths,
)
from psrl.trainer.rows import Row, shared_rows

pytestmark = pytest.mark.unit


def sizes(plan, lengths):
    return [[[lengths[i] for i in batch] for batch in rank] for rank in plan.ranks]


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "cap", "expected"),
    [
        ([7] * 8, 1, 8, [[[7]] * 8]),
        ([8, 8, 8, 1], 2, 8, [[[8], [8]], [[8], [1]]]),
        ([4, 4, 4, 4], 1, 8, [[[4, 4], [4, 4]]]),
        ([5], 2, 8, [[[5]], [[]]]),  # the other rank gets a dummy
        ([3, 3, 3], 2, 6, [[[3, 3]], [[3]]]),
        ([0, 0], 2, 8, [[], []]),
        ([8, 0, 8], 2, 8, [[[8]], [[8]]]),
    ],
)
def test_by_hand(lengths, num_ranks, cap, expected):
    assert sizes(plan_micro_batches(lengths, num_ranks, cap), lengths) == expected


def test_a_sample_above_the_cap_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=rf"sample 1 .* has 9 tokens on a GPU, but {TOKEN_LIMIT_KEY} is 8"):
        plan_micro_batches([8, 9], 1, 8)


def test_padding_is_traded_against_the_cost_of_a_micro_batch():
    lengths = [100] + [10] * 10
    split = [[[100], [10] * 10]]
    together = [[lengths]]
    assert sizes(plan_micro_batches(lengths, 1, 2000, micro_batch_cost=50), lengths) == split
    assert sizes(plan_micro_batches(lengths, 1, 2000, micro_batch_cost=1000), lengths) == together


def least_cost(lengths, cap, cost):
    """Exhaustive over all ways to cut the sorted rows."""
    rows = sorted(lengths, reverse=True)
    best = None
    for cuts in range(1 << (len(rows) - 1)):
        runs, run = [], [rows[0]]
        for i, row in enumerate(rows[1:]):
            if cuts >> i & 1:
                runs.append(run)
                run = []
            run.append(row)
        runs.append(run)
        if all(len(r) * r[0] <= cap for r in runs):
            total = sum(len(r) * r[0] + cost for r in runs)
            best = total if best is None else min(best, total)
    return best


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(12, 40), st.integers(0, 30))
def test_cuts_are_optimal(lengths, cap, cost):
    plan = plan_micro_batches(lengths, 1, cap, micro_batch_cost=cost)
    total = sum(len(batch) * max(batch) + cost for batch in sizes(plan, lengths)[0])
    assert total == least_cost(lengths, cap, cost)


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 5), st.integers(50, 300), st.randoms())
def test_every_sample_once_within_the_cap_and_balanced(lengths, num_ranks, cap, random):
    random.shuffle(lengths)
    plan = plan_micro_batches(lengths, num_ranks, cap)
    batches = [batch for rank in plan.ranks for batch in rank]
    assert sorted(i for batch in batches for i in batch) == [i for i, n in enumerate(lengths) if n > 0]
    assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
    assert all(len(batch) * max(lengths[i] for i in batch) <= cap for batch in batches if batch)
    loads = [sum(lengths[i] for batch in rank for i in batch) for rank in plan.ranks]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert plan == plan_micro_batches(list(lengths), num_ranks, cap)


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "cap", "expected"),
    [
        ([6, 1, 1], 1, 8, [[[6, 1, 1]]]),  # with padding it would take two
        ([7] * 3, 1, 8, [[[7]] * 3]),
        ([4, 4, 4, 4], 1, 8, [[[4, 4], [4, 4]]]),
        ([3, 3, 3], 1, 8, [[[3, 3], [3]]]),
        ([8, 4, 2, 2], 1, 16, [[[8, 4, 2, 2]]]),
        ([9, 8, 7, 4, 3, 1], 1, 16, [[[9, 4, 3], [8, 7, 1]]]),  # as equal as dealing makes them
        ([5, 5, 5], 2, 8, [[[5], [5]], [[5], []]]),  # a rank that needs fewer gets a dummy
        ([5, 5, 3, 3], 2, 5, [[[5], [3]], [[5], [3]]]),
        ([6, 6, 4, 4, 4], 1, 12, [[[6, 6], [4, 4, 4]]]),  # two equal ones by always filling the emptier do not work out
        ([5], 2, 8, [[[5]], [[]]]),
        ([0, 0], 2, 8, [[], []]),
    ],
)
def test_without_padding_by_hand(lengths, num_ranks, cap, expected):
    assert sizes(plan_micro_batches(lengths, num_ranks, cap, padded=False), lengths) == expected


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 5), st.integers(50, 300))
def test_without_padding_every_sample_once_within_the_cap_in_few_micro_batches(lengths, num_ranks, cap):
    plan = plan_micro_batches(lengths, num_ranks, cap, padded=False)
    batches = [batch for rank in plan.ranks for batch in rank]
    assert sorted(i for batch in batches for i in batch) == [i for i, n in enumerate(lengths) if n > 0]
    assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
    for rank in plan.ranks:
        tokens = [sum(lengths[i] for i in batch) for batch in rank]
        assert max(tokens, default=0) <= cap
        assert all([lengths[i] for i in batch] == sorted((lengths[i] for i in batch), reverse=True) for batch in rank)
    assert plan.num_micro_batches <= plan_micro_batches(lengths, num_ranks, cap, 10**6).num_micro_batches


def test_without_padding_a_long_tail_takes_as_many_tokens_as_there_are():
    lengths = [400] + [10] * 200
    padded, unpadded = (plan_micro_batches(lengths, 1, 800, padded=padded) for padded in (True, False))
    computed = sum(len(batch) * max(lengths[i] for i in batch) for batch in padded.ranks[0])
    assert computed == sum(lengths) and padded.num_micro_batches == 4
    assert unpadded.num_micro_batches == 3  # 2400 tokens at 800 each


def test_without_padding_samples_too_long_to_share_a_micro_batch_go_alone():
    plan = plan_micro_batches([600 + i % 7 for i in range(300)], 1, 1000, padded=False)
    assert plan.num_micro_batches == 300


def test_samples_and_groups_that_may_not_be_trained_have_no_length():
    assert trainable_lengths([[5, 0, 6], [0, 7], [3, 4], []]) == [5, 0, 6, 0, 0, 3, 4]
    assert trainable_lengths([[0, 7], [0]], least_valid=1) == [0, 7, 0]


def sample(ids, log_probs, reward=0.0, mask=b""):
    return Sample(
        response_ids=np.array(ids, dtype="<i4").tobytes(),
        logprobs=np.array(log_probs, dtype="<f4").tobytes(),
        reward=reward,
        finish="stop",
        spans=[],
        mask=mask,
    )


def group(number, prompt, samples):
    return Group(
        group=number, data_epoch=0, prompt=number, version=0,
        prompt_ids=np.array(prompt, dtype="<i4").tobytes(), samples=samples,
    )  # fmt: skip


GROUPS = [
    group(7, [1, 2], [sample([3], [-0.5], 0.0), sample([4, 5, 6], [-1.0, -2.0, -3.0], 1.0, mask=b"\x01\x00\x01")]),
    group(8, [9], [sample([8, 8], [-0.1, -0.2], 2.0), sample([], [], 1.0), sample([7], [-4.0], 4.0)]),
]
TOKENS = [[3, 5], [3, 0, 2]]


def build(rank_plan, groups=GROUPS, tokens=TOKENS):
    index = index_samples(tokens)
    rows = rows_of(rank_plan)
    needed = groups_needed(rows, index)
    rewards = {g: rewards_of(groups[g], tokens[g], least_valid=2) for g in needed}
    batches = build_micro_batches(rows, index, {g: groups[g] for g in needed}, rewards)
    options = AdvantageOptions(norm_by_std=False)
    grids = grpo(sample_rewards(index, rewards), batches, options, list).advantages
    return [replace(batch, advantages=grid.float()) for batch, grid in zip(batches, grids, strict=True)]


def rows_of(rank_plan):
    """A row for each sample, or one for each tuple of samples."""
    return [[Row(i if isinstance(i, tuple) else (i,), 0) for i in batch] for batch in rank_plan]


def test_micro_batch_tensors_by_hand():
    first, second = build([(1, 0), (2, 4)])
    assert first.input_ids.tolist() == [[1, 2, 4, 5, 6], [1, 2, 3, 0, 0]]
    assert first.attention_mask.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert first.loss_mask.tolist() == [[False, False, True, False, True], [False, False, True, False, False]]
    assert first.rollout_log_probs.tolist() == [[0, 0, -1, 0, -3], [0, 0, -0.5, 0, 0]]
    assert first.advantages.tolist() == [[0, 0, 0.5, 0, 0.5], [0, 0, -0.5, 0, 0]]
    assert second.input_ids.tolist() == [[9, 8, 8], [9, 7, 0]]
    assert second.advantages.tolist() == [[0, -1, -1], [0, 1, 0]]  # the empty response has no part in the mean
    assert count_loss_tokens([first, second]) == 6
    assert first.old_log_probs is None


def test_responses_that_share_a_prompt_by_hand():
    (batch,) = build([((0, 1), 4)])
    layout = batch.layout
    assert layout is not None
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6], [9, 7, 0, 0, 0, 0]]
    assert layout.segments.tolist() == [[0, 0, 1, 2, 2, 2], [0, 1, -1, -1, -1, -1]]
    assert layout.positions.tolist() == [[0, 1, 2, 2, 3, 4], [0, 1, 0, 0, 0, 0]]
    assert layout.predictors.tolist() == [[-1, 0, 1, 1, 3, 4], [-1, 0, 0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, False, True, True, False, True], [False, True] + [False] * 4]
    assert batch.rollout_log_probs.tolist() == [[0, 0, -0.5, -1, 0, -3], [0, -4, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, -0.5, 0.5, 0, 0.5], [0, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("lengths", "prompts", "max_tokens", "expected"),
    [
        ([4, 5, 6], [3, 3], 100, [Row((0, 1), 6), Row((2,), 6)]),
        ([5, 4, 6], [3, 3], 100, [Row((1, 0), 6), Row((2,), 6)]),  # shortest response first
        ([4, 5, 0], [3, 3], 5, [Row((0,), 4), Row((1,), 5)]),  # both would be 6 > 5
        ([0, 0, 0], [3, 3], 100, []),
        ([1003, 1003, 6], [3, 3], 9999, [Row((0,), 1003), Row((1,), 1003), Row((2,), 6)]),  # attention would cost more
        ([2, 3, 6], [0, 3], 100, [Row((0,), 2), Row((1,), 3), Row((2,), 6)]),  # an empty prompt has nothing to share
    ],
)
def test_shared_rows(lengths, prompts, max_tokens, expected):
    assert shared_rows(lengths, [0, 0, 1], prompts, hidden_size=64, max_tokens=max_tokens) == expected


def test_a_dummy_micro_batch_has_tokens_but_nothing_to_train():
    (dummy,) = build([()])
    assert dummy.input_ids.shape == (1, 2)
    assert not dummy.loss_mask.any()


def test_a_rank_needs_only_the_groups_of_its_samples():
    assert groups_needed(rows_of([(1,), (0,), ()]), index_samples(TOKENS)) == [0]
    assert groups_needed(rows_of([(4, 0)]), index_samples(TOKENS)) == [0, 1]


def test_an_empty_prompt_does_not_train_the_first_token():
    groups = [group(0, [], [sample([5, 6], [-1.0, -2.0], 0.0), sample([5, 6], [-1.0, -2.0], 1.0)])]
    (batch,) = build([(0, 1)], groups, [[2, 2]])
    assert batch.loss_mask.tolist() == [[False, True]] * 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sample([1, 2], [-1.0]), "sample 0 of group 3 has 2 response tokens, 1 log-probs"),
        (sample([1, 2], [-1.0, -1.0], mask=b"\x01"), "a mask of 1"),
        (sample([1, 2], [-1.0, float("nan")]), "sample 0 of group 3 has a log-prob that is not finite"),
    ],
)
def test_a_damaged_sample_is_refused_by_name(bad, message):
    groups = [group(3, [1], [bad, sample([1, 2], [-1.0, -1.0], 1.0)])]
    with pytest.raises(ValueError, match=message):
        build([(1, 0)], groups, [[3, 3]])


def test_a_token_that_its_engine_calls_impossible_is_not_trained(caplog):
    cut = sample([1, 2], [-1.0, float("-inf")])
    (batch,) = build([(0, 1)], [group(3, [1], [cut, sample([1, 2], [-1.0, -1.0], 1.0)])], [[3, 3]])
    assert batch.loss_mask.tolist() == [[False, True, False], [False, True, True]]
    assert torch.isfinite(batch.rollout_log_probs).all()
    assert [
        r.getMessage()
        for r in caplog.records
        if "sample 0 of group 3" in r.getMessage() and "1 of its tokens" in r.getMessage()
    ]


def test_a_greedy_sample_without_a_finite_reward_is_no_baseline():
    greedy = sample([1], [-1.0], float("nan"))
    greedy.greedy = True
    of = rewards_of(group(3, [1], [sample([1], [-1.0], 1.0), greedy]), [2, 0], least_valid=1)
    assert of.baseline is None and of.valid.tolist() == [True, False]


def test_a_log_prob_of_a_token_that_is_not_trained_may_be_anything():
    odd = sample([1, 2], [-1.0, float("nan")], mask=b"\x01\x00")
    (batch,) = build([(0, 1)], [group(3, [1], [odd, sample([1, 2], [-1.0, -1.0], 1.0)])], [[3, 3]])
    assert torch.isfinite(batch.rollout_log_probs).all()
