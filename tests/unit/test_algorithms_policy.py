"""Loss, importance weights and metrics against plain-Python float64 references, and independence from the split."""

import math
from types import SimpleNamespace

import pytest
import torch

from psrl.algorithms import policy, rollout_correction
from psrl.algorithms.losses import ppo_clip_loss
from psrl.algorithms.metrics import combine, stack, unstack
from psrl.algorithms.policy import PolicyLoss
from psrl.algorithms.rollout_correction import token_tis_weights
from psrl.algorithms.token_log_probs import token_log_probs

pytestmark = pytest.mark.unit


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def random_batch(rows=5, length=7, seed=0, old=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(scale):
        return torch.randn(rows, length, generator=generator, dtype=torch.float64).mul(scale).to(dtype)

    log_probs = -draw(1.0).abs()
    mask = torch.rand(rows, length, generator=generator) > 0.4
    mask[0] = False
    batch = SimpleNamespace(
        loss_mask=mask,
        advantages=draw(1.0),
        rollout_log_probs=log_probs + draw(0.8),
        old_log_probs=log_probs + draw(0.4) if old else None,
    )
    return log_probs, batch


def select(batch, rows):
    return SimpleNamespace(**{k: None if v is None else v[rows] for k, v in vars(batch).items()})


def reference_loss(log_probs, old, advantages, mask, weights, low, high, tokens):
    total = 0.0
    for row in range(len(mask)):
        for column in range(len(mask[0])):
            if mask[row][column]:
                ratio = math.exp(log_probs[row][column] - old[row][column])
                clipped = min(max(ratio, 1 - low), 1 + high)
                advantage = advantages[row][column]
                total -= weights[row][column] * min(advantage * ratio, advantage * clipped)
    return total / tokens


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "slope", "clipped"),
    [
        (math.log(1.1), 1.0, -1.1, -1.1, 0),  # inside the range
        (math.log(1.5), 1.0, -1.3, 0.0, 1),  # gain capped at 1 + clip_high
        (math.log(1.5), -1.0, 1.5, 1.5, 0),  # a loss is never capped
        (math.log(0.5), 1.0, -0.5, -0.5, 0),
        (math.log(0.5), -1.0, 0.8, 0.0, 1),  # capped at 1 - clip_low
        (0.0, 2.0, -2.0, -2.0, 0),
        (0.0, 0.0, 0.0, 0.0, 0),
        (800.0, 1.0, -1.3, 0.0, 1),  # would overflow without the clamp
    ],
)
def test_one_token_by_hand(log_ratio, advantage, loss, slope, clipped):
    log_probs = tensor([[-1.0 + log_ratio]]).requires_grad_()
    value, sums = ppo_clip_loss(
        log_probs,
        tensor([[-1.0]]),
        tensor([[advantage]]),
        torch.tensor([[True]]),
        clip_low=0.2,
        clip_high=0.3,
        global_tokens=1,
    )
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert log_probs.grad.item() == pytest.approx(slope)
    assert sums["clipped"].item() == clipped


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_equals_the_reference(weighted):
    log_probs, batch = random_batch()
    weights = (
        token_tis_weights(batch.old_log_probs, batch.rollout_log_probs, batch.loss_mask, 2.0) if weighted else None
    )
    value, sums = ppo_clip_loss(
        log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.loss_mask,
        clip_low=0.2,
        clip_high=0.28,
        global_tokens=17,
        weights=weights,
    )
    plain = (torch.ones_like(log_probs) if weights is None else weights).tolist()
    lists = [t.tolist() for t in (log_probs, batch.old_log_probs, batch.advantages, batch.loss_mask)]
    assert value.item() == pytest.approx(reference_loss(*lists, plain, 0.2, 0.28, 17), rel=1e-12)
    assert sums["tokens"] == batch.loss_mask.sum()
    assert sums["loss"].item() == pytest.approx(value.item() * 17)


def test_token_mean_is_over_all_tokens_not_a_mean_of_means():
    """One token with loss 1 beside nine with loss 0: 0.1, whatever the split."""
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 0], mask[1] = True, True
    advantages = torch.zeros(2, 9)
    advantages[0, 0] = -1.0
    for splits in ([[0, 1]], [[0], [1]]):
        losses = [
            ppo_clip_loss(
                torch.zeros(len(rows), 9),
                None,
                advantages[rows],
                mask[rows],
                clip_low=0.2,
                clip_high=0.2,
                global_tokens=10,
            )[0].item()
            for rows in splits
        ]
        assert sum(losses) == pytest.approx(0.1)


def test_without_old_log_probs_the_ratio_is_one_and_its_gradient_that_of_the_log_probs():
    log_probs, batch = random_batch(old=False, dtype=torch.float32)
    log_probs.requires_grad_()
    loss, sums = PolicyLoss(global_tokens=10)(log_probs, batch)
    loss.backward()
    expected = torch.where(batch.loss_mask, -batch.advantages / 10, 0.0)
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-6, atol=0)
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-5)
    assert sums["actor/sums/clipped"] == 0
    assert sums["actor/sums/kl"] == 0


def test_without_old_log_probs_equals_passing_the_same_values():
    log_probs, batch = random_batch(old=False)
    same = SimpleNamespace(**{**vars(batch), "old_log_probs": log_probs.clone()})
    results = []
    for inputs in (batch, same):
        leaf = log_probs.clone().requires_grad_()
        loss, sums = PolicyLoss(global_tokens=9, token_tis=True)(leaf, inputs)
        loss.backward()
        results.append((loss.item(), leaf.grad, {k: v.item() for k, v in sums.items()}))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("old", [True, False])
def test_all_masked_batch_gives_exactly_zero_and_finite_gradients(poison, old):
    log_probs, batch = random_batch(old=old)
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    for name in ("advantages", "rollout_log_probs"):
        setattr(batch, name, torch.full_like(log_probs, poison))
    log_probs.requires_grad_()
    loss, sums = PolicyLoss(global_tokens=0, token_tis=True)(log_probs, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(log_probs.grad, torch.zeros_like(log_probs))
    combined = unstack(*stack([sums]))
    assert policy.finalise(combined) == {}
    assert combined["actor/sums/loss"] == 0.0


@pytest.mark.parametrize("splits", [[[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 1], [0], [2, 3]]])
def test_gradient_and_metrics_do_not_depend_on_the_split(splits):
    log_probs, batch = random_batch()
    loss_fn = PolicyLoss(global_tokens=int(batch.loss_mask.sum()), token_tis=True)

    def accumulate(parts):
        leaf = log_probs.clone().requires_grad_()
        sums = []
        for rows in parts:
            loss, part = loss_fn(leaf[rows], select(batch, rows))
            loss.backward()
            sums.append(part)
        return (
            leaf.grad,
            policy.finalise(unstack(*stack(sums))),
            policy.finalise(combine(unstack(*stack([part])) for part in sums)),
        )

    gradient, on_device, on_host = accumulate(splits)
    expected_gradient, expected, _ = accumulate([list(range(5))])
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
    assert on_device == pytest.approx(expected, rel=1e-9)
    assert on_host == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("train", "rollout", "threshold", "weight"),
    [
        (-1.0, -1.0, 2.0, 1.0),
        (-1.0, -1.0 - math.log(1.5), 2.0, 1.5),
        (-1.0, -1.0 - math.log(3.0), 2.0, 2.0),  # truncated
        (-1.0 - math.log(4.0), -1.0, 2.0, 0.25),  # never raised
        (0.0, -100.0, 1e12, math.exp(20.0)),  # log-ratio clamped
        (-100.0, 0.0, 2.0, math.exp(-20.0)),
    ],
)
def test_token_tis_weights_by_hand(train, rollout, threshold, weight):
    log_probs = tensor([[train, train]]).requires_grad_()
    weights = token_tis_weights(log_probs, tensor([[rollout, rollout]]), torch.tensor([[True, False]]), threshold)
    assert weights.tolist() == [[pytest.approx(weight), 0.0]]
    assert not weights.requires_grad


def test_weights_multiply_the_loss_without_gradient_of_their_own():
    log_probs, batch = random_batch(old=False)
    leaf = log_probs.clone().requires_grad_()
    loss, _ = PolicyLoss(global_tokens=1, token_tis=True, is_threshold=2.0)(leaf, batch)
    loss.backward()
    weights = torch.exp(log_probs - batch.rollout_log_probs).clamp(max=2.0)
    expected = torch.where(batch.loss_mask, -batch.advantages * weights, 0.0)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=0)


def test_bypass_mode_takes_the_engine_log_probs_as_the_old_ones():
    log_probs, batch = random_batch()
    loss, sums = PolicyLoss(global_tokens=11, bypass_mode=True, token_tis=True)(log_probs, batch)
    ones = torch.ones_like(log_probs).tolist()
    lists = [t.tolist() for t in (log_probs, batch.rollout_log_probs, batch.advantages, batch.loss_mask)]
    assert loss.item() == pytest.approx(reference_loss(*lists, ones, 0.2, 0.2, 11), rel=1e-12)
    metrics = policy.finalise(unstack(*stack([sums])))
    difference = (batch.rollout_log_probs - log_probs)[batch.loss_mask].mean().item()
    assert metrics["rollout_corr/kl"] == pytest.approx(difference)


def reference_metrics(train, rollout, mask, threshold, truncated):
    """Definitions written out with plain floats, one token and one sequence at a time."""
    rho, weights, per_sequence = [], [], []
    for t_row, r_row, m_row in zip(train, rollout, mask, strict=True):
        pairs = [(t, r) for t, r, m in zip(t_row, r_row, m_row, strict=True) if m]
        if pairs:
            per_sequence.append(pairs)
        for t, r in pairs:
            rho.append(math.exp(max(-20.0, min(20.0, t - r))))
            weights.append(min(rho[-1], threshold) if truncated else rho[-1])
    n = len(rho)
    mean = math.fsum(weights) / n
    train_nll = [-math.fsum(t for t, _ in pairs) / len(pairs) for pairs in per_sequence]
    rollout_nll = [-math.fsum(r for _, r in pairs) / len(pairs) for pairs in per_sequence]
    products = [math.exp(max(-20.0, min(20.0, math.fsum(t - r for t, r in pairs)))) for pairs in per_sequence]
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(math.fsum((w - mean) ** 2 for w in weights) / n),
        "rollout_is_min": min(weights),
        "rollout_is_max": max(weights),
        "rollout_is_eff_sample_size": math.fsum(weights) ** 2 / (n * math.fsum(w * w for w in weights)),
        "ratio_fraction_high": sum(r > threshold for r in rho) / n,
        "ratio_fraction_low": sum(r < 1 / threshold for r in rho) / n,
        "rs_masked_fraction": 0.0,
        "kl": math.fsum(-math.log(r) for r in rho) / n,
        "k3_kl": math.fsum(r - 1 - math.log(r) for r in rho) / n,
        "chi2_token": math.fsum(r * r for r in rho) / n - 1,
        "chi2_seq": math.fsum(p * p for p in products) / len(products) - 1,
        "ppl_ratio": math.fsum(math.exp(a - b) for a, b in zip(train_nll, rollout_nll, strict=True)) / len(train_nll),
        "training_ppl": math.fsum(map(math.exp, train_nll)) / len(train_nll),
        "rollout_ppl": math.fsum(map(math.exp, rollout_nll)) / len(rollout_nll),
    }


@pytest.mark.parametrize("truncated", [True, False])
def test_correction_metrics_equal_the_reference(truncated):
    log_probs, batch = random_batch(rows=9, length=11, seed=3)
    weights = token_tis_weights(log_probs, batch.rollout_log_probs, batch.loss_mask, 1.5) if truncated else None
    sums = rollout_correction.correction_sums(
        log_probs, batch.rollout_log_probs, batch.loss_mask, threshold=1.5, weights=weights
    )
    result = rollout_correction.finalise({name: value.item() for name, value in sums.items()})
    lists = [t.tolist() for t in (log_probs, batch.rollout_log_probs, batch.loss_mask)]
    expected = reference_metrics(*lists, 1.5, truncated)
    assert result.keys() == expected.keys()
    assert result == pytest.approx(expected, rel=1e-9)


def test_correction_metrics_by_hand():
    """Two tokens with rho 2 and 1/2 in one sequence: product 1."""
    train, rollout = tensor([[math.log(0.5), math.log(0.25)]]), tensor([[math.log(0.25), math.log(0.5)]])
    mask = torch.tensor([[True, True]])
    sums = rollout_correction.correction_sums(train, rollout, mask, threshold=1.5, weights=None)
    result = rollout_correction.finalise({name: value.item() for name, value in sums.items()})
    root8 = math.sqrt(8)
    assert result == pytest.approx(
        {
            "rollout_is_mean": 1.25,
            "rollout_is_std": 0.75,
            "rollout_is_min": 0.5,
            "rollout_is_max": 2.0,
            "rollout_is_eff_sample_size": 6.25 / (2 * 4.25),
            "ratio_fraction_high": 0.5,
            "ratio_fraction_low": 0.5,
            "rs_masked_fraction": 0.0,
            "kl": 0.0,
            "k3_kl": 0.25,
            "chi2_token": 1.125,
            "chi2_seq": 0.0,
            "ppl_ratio": 1.0,
            "training_ppl": root8,
            "rollout_ppl": root8,
        },
        abs=1e-12,
    )


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
