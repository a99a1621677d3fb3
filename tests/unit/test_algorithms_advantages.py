"""Every advantage estimator: hand-computed tables, an independent reference in plain loops, and rewards that are no numbers."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batches import make_batch, run_ranks, select, tensor

from psrl.algorithms.advantages import ESTIMATORS, AdvantageOptions, SampleRewards
from psrl.algorithms.advantages.grpo import STD_EPS
from psrl.algorithms.rewards import group_rewards
from psrl.algorithms.sequences import Sequences

pytestmark = pytest.mark.unit

NAN, INF = math.nan, math.inf
S2 = math.sqrt(0.5)  # std (n - 1) of [0, 1]
S3 = math.sqrt(1 / 3)  # std (n - 1) of [1, 0, 1]


def one_group(name, rewards, *, least_valid=2, baseline=None, **options):
    """Advantages of single-token samples of one prompt."""
    read = group_rewards(rewards, least_valid)
    n = len(rewards)
    vectors = SampleRewards(
        outcome=tensor(read.rewards.tolist()),
        valid=torch.from_numpy(read.valid),
        group=torch.zeros(n, dtype=torch.int64),
        baseline=None if baseline is None else torch.full((n,), baseline, dtype=torch.float64),
    )
    batch = make_batch(torch.from_numpy(read.valid)[:, None])
    (grid,) = ESTIMATORS[name](vectors, [batch], AdvantageOptions(**options), list).advantages
    return grid.squeeze(-1).tolist()


@pytest.mark.parametrize(
    ("name", "rewards", "options", "expected"),
    [
        ("grpo", [0, 1], {}, [-0.5 / (S2 + 1e-6), 0.5 / (S2 + 1e-6)]),
        ("grpo", [0, 1], {"norm_by_std": False}, [-0.5, 0.5]),
        ("grpo", [1, 2, 3, 6], {"norm_by_std": False}, [-2, -1, 0, 3]),
        ("grpo", [0.1, 0.1, 0.1], {}, [0, 0, 0]),
        ("grpo", [0.1, 0.1, 0.1], {"norm_by_std": False}, [0, 0, 0]),
        ("grpo", [1, 0, NAN, 1], {}, [(1 / 3) / (S3 + 1e-6), (-2 / 3) / (S3 + 1e-6), 0, (1 / 3) / (S3 + 1e-6)]),
        ("grpo", [None, 2, -INF, 4], {"norm_by_std": False}, [0, -1, 0, 1]),
        ("grpo", [True, False], {"norm_by_std": False}, [0.5, -0.5]),
        ("rloo", [0, 1], {}, [-1, 1]),
        ("rloo", [1, 2, 3, 6], {}, [1 - 11 / 3, 2 - 10 / 3, 3 - 3, 6 - 2]),
        ("rloo", [0.1] * 7, {}, [0] * 7),
        ("rloo", [5, NAN, 1], {}, [4, 0, -4]),
        ("remax", [0, 1, 3], {"baseline": 1.0}, [-1, 0, 2]),
        ("remax", [2], {"baseline": 0.5, "least_valid": 1}, [1.5]),
        ("reinforce_plus_plus", [0, 2], {"least_valid": 1}, [-1 / math.sqrt(2 + 1e-8), 1 / math.sqrt(2 + 1e-8)]),
        ("reinforce_plus_plus", [0.1, 0.1, 0.1], {"least_valid": 1}, [0, 0, 0]),
        ("reinforce_plus_plus", [7], {"least_valid": 1}, [0]),
    ],
)
def test_hand_computed(name, rewards, options, expected):
    assert one_group(name, rewards, **options) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_equal_rewards_give_exactly_zero(name):
    assert one_group(name, [0.1] * 7) == [0.0] * 7
    assert one_group(name, [1e308] * 2) == [0.0] * 2  # their sum overflows


@pytest.mark.parametrize(
    ("rewards", "least", "valid"),
    [
        ([1, 0, NAN, 1], 2, [True, True, False, True]),
        ([NAN, NAN, NAN, 1], 2, [False] * 4),
        ([NAN, NAN, NAN, 1], 1, [False, False, False, True]),
        ([INF, 0], 2, [False, False]),
        ([None], 1, [False]),
        ([1.0], 2, [False]),
        ([1.0], 1, [True]),
        ([], 2, []),
    ],
)
def test_rewards_that_are_no_numbers_are_left_out(rewards, least, valid):
    read = group_rewards(rewards, least)
    assert read.valid.tolist() == valid
    assert np.isfinite(read.rewards).all()
    assert not read.rewards[~read.valid].any()


@pytest.mark.parametrize("bad", ["1", [1.0], 1j, {}])
def test_a_reward_that_is_of_another_type_is_refused(bad):
    with pytest.raises(TypeError, match=r"reward 1 of a group is .*, not a number"):
        group_rewards([0.0, bad, 1.0], 2)


@given(
    st.lists(st.one_of(st.none(), st.sampled_from([NAN, INF, -INF]), st.floats(-1e3, 1e3)), min_size=2, max_size=9),
    st.booleans(),
)
def test_group_estimators_equal_an_independent_reference_and_are_never_nan(rewards, by_std):
    good = [r for r in rewards if r is not None and math.isfinite(r)]
    grpo, rloo = one_group("grpo", rewards, norm_by_std=by_std), one_group("rloo", rewards)
    assert all(map(math.isfinite, grpo + rloo))
    if len(good) < 2:
        assert not any(grpo + rloo)
        return
    mean = statistics.fmean(good)
    scale = statistics.stdev(good) + STD_EPS if by_std else 1.0
    kept = [i for i, r in enumerate(rewards) if r is not None and math.isfinite(r)]
    assert [grpo[i] for i in kept] == pytest.approx([(r - mean) / scale for r in good], rel=1e-6, abs=1e-6)
    others = [(math.fsum(good) - r) / (len(good) - 1) for r in good]
    assert [rloo[i] for i in kept] == pytest.approx(
        [r - o for r, o in zip(good, others, strict=True)], rel=1e-6, abs=1e-6
    )


# ---- estimators of tokens ------------------------------------------------------------------------------------


def buffer(seed=0, penalties=True):
    """Seven samples of three groups in four rows, two of which hold several; gaps in the masks are another speaker's words."""
    ids = torch.tensor(
        [
            [-1, 0, 0, 0, 0, 1, 1, -1],
            [-1, -1, 2, 2, 3, 3, 3, 4],
            [5, 5, 5, 5, 5, 5, 5, 5],
            [-1, 6, -1, -1, -1, -1, -1, -1],
        ]
    )
    mask = ids >= 0
    mask[0, 2] = mask[2, 3] = mask[2, 4] = mask[2, 7] = False
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(3, *ids.shape, generator=generator, dtype=torch.float64)
    batch = make_batch(mask, Sequences(ids, 7), values=noise[0], kl_penalty=noise[1] * 0.1 if penalties else None)
    batch.values[~mask] = NAN
    if penalties:
        batch.kl_penalty[~mask] = NAN
    outcome = torch.rand(7, generator=generator, dtype=torch.float64)
    return batch, SampleRewards(
        outcome=outcome,
        valid=torch.ones(7, dtype=torch.bool),
        group=torch.tensor([0, 0, 1, 1, 1, 2, 2]),
        baseline=torch.tensor([0.5, 0.5, 0.1, 0.1, 0.1, 0.9, 0.9], dtype=torch.float64),
        kl_penalty=batch.sequences.sum(torch.where(mask, batch.kl_penalty, 0.0)) if penalties else None,
    )


def samples_of(batch):
    """{sample: its trainable (row, column) in order}."""
    places = {}
    for row, column in batch.loss_mask.nonzero().tolist():
        places.setdefault(int(batch.sequences.ids[row, column]), []).append((row, column))
    return places


def reference_tokens(batch, rewards, gamma, lam):
    """({place: return to go}, {place: GAE}) by going through each sample from its end."""
    to_go, advantage = {}, {}
    for sample, places in samples_of(batch).items():
        g = a = next_value = 0.0
        for number, place in enumerate(reversed(places)):
            reward = float(rewards.outcome[sample]) if number == 0 else 0.0
            reward -= 0.0 if batch.kl_penalty is None else float(batch.kl_penalty[place])
            value = float(batch.values[place])
            g = reward + gamma * g
            a = reward + gamma * next_value - value + gamma * lam * a
            next_value = value
            to_go[place], advantage[place] = g, a
    return to_go, advantage


def whitened(by_place):
    values = list(by_place.values())
    mean, variance = statistics.fmean(values), statistics.variance(values)
    return {place: (v - mean) / math.sqrt(variance + 1e-8) for place, v in by_place.items()}


def places_of(grid, batch):
    assert not grid[~batch.loss_mask].any()
    return {(r, c): grid[r, c].item() for r, c in batch.loss_mask.nonzero().tolist()}


@pytest.mark.parametrize("penalties", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.0, 0.5), (1.0, 0.0)])
def test_token_estimators_equal_an_independent_reference(penalties, gamma, lam):
    batch, rewards = buffer(penalties=penalties)
    options = AdvantageOptions(gamma=gamma, lam=lam)
    to_go, advantage = reference_tokens(batch, rewards, gamma, lam)
    gae = ESTIMATORS["gae"](rewards, [batch], options, list)
    assert places_of(gae.advantages[0], batch) == pytest.approx(whitened(advantage), rel=1e-9, abs=1e-12)
    returns = {place: a + float(batch.values[place]) for place, a in advantage.items()}
    assert places_of(gae.returns[0], batch) == pytest.approx(returns, rel=1e-9, abs=1e-12)
    plus = ESTIMATORS["reinforce_plus_plus"](rewards, [batch], options, list)
    assert places_of(plus.advantages[0], batch) == pytest.approx(whitened(to_go), rel=1e-9, abs=1e-12)
    undiscounted, _ = reference_tokens(batch, rewards, 1.0, 1.0)
    remax = ESTIMATORS["remax"](rewards, [batch], options, list)
    less = {p: g - float(rewards.baseline[batch.sequences.ids[p]]) for p, g in undiscounted.items()}
    assert places_of(remax.advantages[0], batch) == pytest.approx(less, rel=1e-9, abs=1e-12)


def test_gae_by_hand():
    """Three tokens, reward 1 at the end, gamma 0.5, lambda 0.5: delta = [-0.1, 0.1, 0.4], A = [0, 0.2, 0.4]."""
    batch = make_batch(torch.ones(1, 3, dtype=torch.bool), values=tensor([[0.2, 0.2, 0.6]]))
    rewards = SampleRewards(outcome=tensor([1.0]), valid=torch.tensor([True]), group=torch.tensor([0]))
    result = ESTIMATORS["gae"](rewards, [batch], AdvantageOptions(gamma=0.5, lam=0.5), list)
    assert result.returns[0].tolist() == [
        pytest.approx([0.2 - 0.1 + 0.25 * (0.1 + 0.25 * 0.4), 0.2 + 0.1 + 0.25 * 0.4, 0.6 + 0.4])
    ]


def test_kl_penalties_of_the_reward_reach_group_estimators_as_sums():
    batch, rewards = buffer()
    grid = ESTIMATORS["rloo"](rewards, [batch], AdvantageOptions(), list).advantages[0]
    total = (rewards.outcome - rewards.kl_penalty).tolist()
    assert grid[0, 1].item() == pytest.approx(total[0] - total[1])
    assert grid[1, 7].item() == pytest.approx(total[4] - (total[2] + total[3]) / 2)


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("ranks", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 1], [2, 0]], [[0, 1, 2, 3], []]])
def test_no_split_over_micro_batches_and_ranks_changes_an_advantage(name, ranks):
    batch, rewards = buffer()
    options = AdvantageOptions(gamma=0.9, lam=0.8)
    whole = ESTIMATORS[name](rewards, [batch], options, list).advantages[0]

    def of_rank(rows):
        parts = [select(batch, [row]) for row in rows]
        return lambda all_sum: ESTIMATORS[name](rewards, parts, options, all_sum).advantages

    grids = run_ranks([of_rank(rows) for rows in ranks])
    for rows, mine in zip(ranks, grids, strict=True):
        for row, grid in zip(rows, mine, strict=True):
            torch.testing.assert_close(grid[0], whole[row], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_empty_masks_give_zeros(name):
    batch, rewards = buffer()
    batch.loss_mask[:] = False
    grid = ESTIMATORS[name](rewards, [batch], AdvantageOptions(), list).advantages[0]
    assert torch.equal(grid, torch.zeros_like(grid))
    assert ESTIMATORS[name](rewards, [], AdvantageOptions(), list).advantages == []


@pytest.mark.parametrize(("name", "missing"), [("gae", "critic's values"), ("remax", "greedy sample")])
def test_what_an_estimator_lacks_is_named(name, missing):
    batch, rewards = buffer()
    batch.values = None
    without = SampleRewards(outcome=rewards.outcome, valid=rewards.valid, group=rewards.group)
    with pytest.raises(ValueError, match=missing):
        ESTIMATORS[name](without, [batch], AdvantageOptions(), list)
