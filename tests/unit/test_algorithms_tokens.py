"""Log-probs and entropies from logits, KL estimates and their controller, the overlong penalty, and combining metrics."""

import math

import pytest
import torch
from loss_batches import make_batch, random_batch, tensor

from psrl.algorithms import policy
from psrl.algorithms.aggregation import Aggregation
from psrl.algorithms.kl import KL_TYPES, KLControl, kl_estimate
from psrl.algorithms.metrics import combine, stack, unstack
from psrl.algorithms.overlong import overlong_penalty
from psrl.algorithms.policy import PolicyLoss
from psrl.algorithms.token_entropy import token_entropies
from psrl.algorithms.token_log_probs import token_log_probs

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("chunk_elements", [1, 12, 1 << 20])
def test_token_log_probs_equal_log_softmax_in_value_and_gradient(monkeypatch, temperature, chunk_elements):
    monkeypatch.setattr("psrl.algorithms.token_log_probs.CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = torch.randn(7, 5) * 4
    tokens = torch.tensor([0, 4, 2, 2, 1, 3, 0])
    upstream = torch.randn(7)
    ours, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    value = token_log_probs(ours, tokens, temperature)
    expected = torch.log_softmax(reference / (temperature or 1.0), -1).gather(-1, tokens[:, None]).squeeze(-1)
    value.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(value, expected.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad, reference.grad.float(), rtol=1e-5, atol=1e-6)


def test_token_log_probs_of_no_token():
    logits = torch.zeros(0, 5, requires_grad=True)
    token_log_probs(logits, torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert logits.grad.shape == (0, 5)


def test_combine_adds_and_keeps_extremes():
    parts = [{"n": 1, "w_min": 3.0, "w_max": 3.0}, {"n": 2, "w_min": 2.0, "w_max": 2.0, "other": 5}]
    assert combine(parts) == {"n": 3, "w_min": 2.0, "w_max": 3.0, "other": 5}
    assert combine([]) == {}


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("chunk_elements", [1, 12, 1 << 20])
def test_token_entropies_equal_the_definition_in_value_and_gradient(monkeypatch, temperature, chunk_elements):
    monkeypatch.setattr("psrl.algorithms.token_log_probs.CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits, upstream = torch.randn(7, 5) * 4, torch.randn(7)
    ours, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    value = token_entropies(ours, temperature)
    p = torch.softmax(reference / (temperature or 1.0), -1)
    expected = -(p * p.log()).sum(-1)
    value.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(value, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad, reference.grad.float(), rtol=1e-4, atol=1e-6)


def test_entropy_of_certainty_and_of_impossible_tokens():
    logits = torch.tensor([[0.0, -math.inf, -math.inf], [1.0, 1.0, -math.inf], [0.0, 0.0, 0.0]]).requires_grad_()
    value = token_entropies(logits)
    value.sum().backward()
    assert value.tolist() == pytest.approx([0.0, math.log(2), math.log(3)], abs=1e-6)
    assert torch.isfinite(logits.grad).all()
    token_entropies(torch.zeros(0, 5, requires_grad=True)).sum().backward()


# ---- KL to the reference policy ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "k1", "absolute", "k2", "k3"),
    [
        (0.0, 0.0, 0.0, 0.0, 0.0),
        (0.5, 0.5, 0.5, 0.125, math.exp(-0.5) - 0.5),
        (-0.5, -0.5, 0.5, 0.125, math.exp(0.5) - 1.5),
        (30.0, 20.0, 20.0, 200.0, 10.0),  # clamped at 20; k3 at 10
        (-30.0, -20.0, 20.0, 200.0, 10.0),
    ],
)
def test_kl_estimates_by_hand(difference, k1, absolute, k2, k3):
    expected = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
    for name, kind in KL_TYPES.items():
        log_probs, reference = tensor([[-1.0 + difference, math.nan]]), tensor([[-1.0, 0.0]])
        value = kl_estimate(log_probs, reference, torch.tensor([[True, False]]), name)
        assert value.tolist() == [[pytest.approx(expected[kind], abs=1e-12), 0.0]]


def test_an_unknown_estimate_is_named():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(tensor([[0.0]]), tensor([[0.0]]), torch.tensor([[True]]), "k4")


@pytest.mark.parametrize("kind", ["abs", "k1", "k2", "k3"])
def test_gradients_of_kl_estimates_by_finite_differences(kind):
    log_probs, batch = random_batch()
    leaf = log_probs.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: kl_estimate(x, batch.ref_log_probs, batch.loss_mask, kind).sum(), [leaf], eps=1e-6, atol=1e-7
    )


def test_unbiased_estimates_average_to_the_kl():
    """Over all tokens of a distribution, weighted by their probability: the exact KL."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = (p * (p / q).log()).sum().item()
    for kind in ("k1", "k3"):
        estimate = kl_estimate(p.log()[None], q.log()[None], torch.ones(1, 3, dtype=torch.bool), kind)
        assert (p * estimate[0]).sum().item() == pytest.approx(exact)


def test_kl_and_entropy_are_parts_of_the_loss():
    log_probs, batch = random_batch(dtype=torch.float64)
    entropy, mask = log_probs.square(), batch.loss_mask
    agg = Aggregation(tokens=int(mask.sum()))
    plain = PolicyLoss(aggregation=agg)(log_probs, batch)[0].item()
    loss_fn = PolicyLoss(aggregation=agg, kl_loss_coef=0.5, kl_loss_type="mse", entropy_coeff=0.25)
    loss, sums = loss_fn(log_probs, batch, entropy)
    kl = ((log_probs - batch.ref_log_probs).square() / 2)[mask].mean().item()
    assert loss.item() == pytest.approx(plain + 0.5 * kl - 0.25 * entropy[mask].mean().item())
    metrics = policy.finalise(unstack(*stack([sums])))
    assert metrics["actor/kl_loss"] == pytest.approx(kl)
    assert metrics["actor/entropy"] == pytest.approx(entropy[mask].mean().item())
    assert metrics["actor/pg_loss"] == pytest.approx(plain)
    assert loss_fn.needs_entropy and not PolicyLoss(aggregation=agg).needs_entropy
    reported, _ = PolicyLoss(aggregation=agg, report_entropy=True)(log_probs, batch, entropy)
    assert reported.item() == plain


def test_a_kl_loss_without_reference_is_refused():
    batch = make_batch(torch.tensor([[True]]))
    with pytest.raises(ValueError, match="reference policy"):
        PolicyLoss(aggregation=Aggregation(), kl_loss_coef=0.1)(tensor([[-1.0]]), batch)


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.1, 1.0), (0.3, 1.02), (0.0, 0.98), (0.11, 1.01), (0.095, 0.995), (1e9, 1.02)]
)
def test_the_adaptive_coefficient_moves_by_at_most_a_fifth_of_the_horizon(kl, factor):
    control = KLControl(coefficient=2.0, target_kl=0.1, horizon=100)
    assert control.after(kl, 10).coefficient == pytest.approx(2.0 * factor)
    assert KLControl(coefficient=2.0).after(kl, 10).coefficient == 2.0


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (120, -2.0), (0, 0.0)]
)
def test_overlong_penalty(tokens, penalty):
    assert overlong_penalty(tokens, 100, 20, 2.0) == pytest.approx(penalty)
