import numpy as np
import pytest

from psrl.cost_model.fit import FitError, StepTime, fit_cost_model, hold_out, relative_errors
from psrl.cost_model.table import summarize
from psrl.protocol.cost_model import CostModel

pytestmark = pytest.mark.unit

SIZES, LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128), (64, 256, 1024, 4096)
TRUE = CostModel(
    other_threshold=0.0064,
    other_latency_b=0.0027,
    other_latency_k=0.0001231,
    attn_latency_b=0.0,
    attn_latency_k=3.35e-8,
)


def points_of(model, sizes=SIZES, lengths=LENGTHS, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        StepTime(num_seqs=n, kv_tokens=n * t, latency_s=model.latency_s(n, n * t) * rng.lognormal(0.0, noise))
        for n in sizes
        for t in lengths
    ]


def coefficients(model):
    return [model.other_threshold, model.other_latency_b, model.other_latency_k, model.attn_latency_k]


def test_exact_points_give_the_coefficients_back():
    assert coefficients(fit_cost_model(points_of(TRUE))) == pytest.approx(coefficients(TRUE), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_noisy_points_give_nearly_the_coefficients(seed):
    fitted = fit_cost_model(points_of(TRUE, noise=0.03, seed=seed))
    assert fitted.other_threshold == pytest.approx(TRUE.other_threshold, rel=0.03)
    assert fitted.other_latency_b == pytest.approx(TRUE.other_latency_b, rel=0.6)  # far outside of what is measured
    assert fitted.other_latency_k == pytest.approx(TRUE.other_latency_k, rel=0.12)
    assert fitted.attn_latency_k == pytest.approx(TRUE.attn_latency_k, rel=0.08)
    assert summarize(fitted, points_of(TRUE)).largest < 0.07


def test_a_few_points_far_off_change_little():
    points = points_of(TRUE, noise=0.01)
    for index in (3, 11, 20, 29):
        p = points[index]
        points[index] = StepTime(num_seqs=p.num_seqs, kv_tokens=p.kv_tokens, latency_s=4 * p.latency_s)
    assert summarize(fit_cost_model(points), points_of(TRUE)).largest < 0.03


def test_a_constant_of_attention_goes_into_the_other_two():
    """max(T, B + K n) + c is max(T + c, B + c + K n): whole steps cannot tell the two apart."""
    c = 0.0028
    model = CostModel(
        other_threshold=0.0064, other_latency_b=0.0027, other_latency_k=0.0001231, attn_latency_b=c, attn_latency_k=3e-8
    )
    fitted = fit_cost_model(points_of(model))
    assert fitted.attn_latency_b == 0
    assert coefficients(fitted) == pytest.approx([0.0064 + c, 0.0027 + c, 0.0001231, 3e-8], rel=1e-6)


@pytest.mark.parametrize(
    ("threshold", "b", "k"),
    [
        (0.02, 0.0, 1e-5),  # flat at every measured size
        (0.0, 0.002, 0.001),  # linear at every measured size
    ],
)
def test_one_regime_alone_is_predicted_exactly(threshold, b, k):
    model = CostModel(
        other_threshold=threshold, other_latency_b=b, other_latency_k=k, attn_latency_b=0.0, attn_latency_k=1e-7
    )
    fitted = fit_cost_model(points_of(model))
    assert max(map(abs, relative_errors(fitted, points_of(model)))) < 1e-6


def test_no_coefficient_is_negative_where_attention_costs_nothing():
    falling = [
        StepTime(num_seqs=n, kv_tokens=n * t, latency_s=0.01 + 0.001 * n - 1e-8 * n * t) for n in SIZES for t in LENGTHS
    ]
    assert min(coefficients(fit_cost_model(falling))) >= 0


@pytest.mark.parametrize(
    ("points", "says"),
    [
        (points_of(TRUE)[:3], "3 points are too few"),
        (points_of(TRUE, sizes=(4,)), "same number of sequences"),
        (points_of(TRUE, lengths=(64,)), "same KV tokens a sequence"),
        ([*points_of(TRUE), StepTime(num_seqs=1, kv_tokens=1, latency_s=0.0)], "both must be above 0"),
    ],
)
def test_points_that_determine_nothing_are_refused(points, says):
    with pytest.raises(FitError, match=says):
        fit_cost_model(points)


def test_held_out_points_are_a_share_and_depend_on_the_seed_alone():
    first, again, other = (hold_out(35, 0.25, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert len(first) == 9 and first <= set(range(35))
    assert first == again != other
    assert hold_out(35, 0.0, np.random.default_rng(1)) == set()


def test_errors_are_summarized_by_hand():
    constant = CostModel(
        other_threshold=1.0, other_latency_b=0.0, other_latency_k=0.0, attn_latency_b=0.0, attn_latency_k=0.0
    )
    points = [StepTime(num_seqs=1, kv_tokens=0, latency_s=s) for s in (1.0, 2.0, 0.5)]
    assert relative_errors(constant, points) == [0.0, -0.5, 1.0]
    summary = summarize(constant, points)
    assert (summary.num_points, summary.median, summary.largest) == (3, 0.5, 1.0)
    assert summary.p90 == pytest.approx(0.9)
