"""GRPO advantages: hand-computed tables, an independent reference, and rewards that are not numbers."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.algorithms.advantages import STD_EPS, grpo_advantages

pytestmark = pytest.mark.unit

NAN, INF = math.nan, math.inf
S2 = math.sqrt(0.5)  # std (n - 1) of [0, 1]
S3 = math.sqrt(1 / 3)  # std (n - 1) of [1, 0, 1]

CASES = [
    ("pair", [0, 1], True, [-0.5 / (S2 + 1e-6), 0.5 / (S2 + 1e-6)], [True, True], 0),
    ("pair, mean only", [0, 1], False, [-0.5, 0.5], [True, True], 0),
    ("four, mean only", [1, 2, 3, 6], False, [-2, -1, 0, 3], [True] * 4, 0),
    ("equal rewards", [0.1, 0.1, 0.1], True, [0, 0, 0], [True] * 3, 0),
    ("equal rewards, mean only", [0.1, 0.1, 0.1], False, [0, 0, 0], [True] * 3, 0),
    (
        "NaN is masked",
        [1, 0, NAN, 1],
        True,
        [(1 / 3) / (S3 + 1e-6), (-2 / 3) / (S3 + 1e-6), 0, (1 / 3) / (S3 + 1e-6)],
        [True, True, False, True],
        1,
    ),
    ("None and inf are masked", [None, 2, -INF, 4], False, [0, -1, 0, 1], [False, True, False, True], 2),
    ("booleans are numbers", [True, False], False, [0.5, -0.5], [True, True], 0),
]


@pytest.mark.parametrize(
    ("rewards", "by_std", "expected", "valid", "invalid"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_hand_computed(rewards, by_std, expected, valid, invalid):
    result = grpo_advantages(rewards, norm_by_std=by_std)
    assert result.advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert result.valid.tolist() == valid
    assert result.invalid_rewards == invalid
    assert not result.dropped


def test_equal_rewards_give_exactly_zero():
    assert grpo_advantages([0.1] * 7).advantages.tolist() == [0.0] * 7


@pytest.mark.parametrize(
    ("rewards", "invalid"), [([NAN, NAN, NAN, 1], 3), ([INF, 0], 1), ([None], 1), ([1.0], 0), ([], 0)]
)
def test_fewer_than_two_valid_rewards_drop_the_group(rewards, invalid):
    result = grpo_advantages(rewards)
    assert result.dropped
    assert not result.valid.any()
    assert result.advantages.tolist() == [0.0] * len(rewards)
    assert result.invalid_rewards == invalid


@pytest.mark.parametrize("bad", ["1", [1.0], 1j, {}])
def test_a_reward_that_is_not_a_number_is_refused(bad):
    with pytest.raises(TypeError, match=r"grpo_advantages: reward 1 is .*, not a number"):
        grpo_advantages([0.0, bad, 1.0])


@given(
    st.lists(st.one_of(st.none(), st.sampled_from([NAN, INF, -INF]), st.floats(-1e3, 1e3)), min_size=2, max_size=9),
    st.booleans(),
)
def test_equals_an_independent_reference_and_is_never_nan(rewards, by_std):
    result = grpo_advantages(rewards, by_std)
    good = [r for r in rewards if r is not None and math.isfinite(r)]
    assert all(math.isfinite(a) for a in result.advantages)
    assert result.invalid_rewards == len(rewards) - len(good)
    assert result.dropped == (len(good) < 2)
    if result.dropped:
        return
    mean = statistics.fmean(good)
    scale = statistics.stdev(good) + STD_EPS if by_std else 1.0
    expected = [(r - mean) / scale for r in good]
    assert result.advantages[result.valid].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
