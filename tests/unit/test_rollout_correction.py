"""Importance weights, rejection and rollout_corr/ metrics: exactly the tokens that the definitions say, and no others."""

import math

import pytest
import torch
from loss_batches import make_batch, random_batch, run_ranks, select, tensor

from psrl.algorithms import policy, rollout_correction
from psrl.algorithms.aggregation import Aggregation
from psrl.algorithms.metrics import combine, stack, unstack
from psrl.algorithms.policy import PolicyLoss
from psrl.algorithms.rollout_correction import (
    Correction,
    Rule,
    accepted_tokens,
    apply_correction,
    importance_weights,
    log_ratios,
)
from psrl.algorithms.sequences import Sequences
from psrl.config.correction import RULES

pytestmark = pytest.mark.unit

IDS = torch.tensor([[-1, 0, 0, 0, 1, 1], [2, 2, 2, 2, 2, 2], [-1, 3, 3, -1, -1, -1]])
RHO = [[9.0, 0.5, 2.0, 4.0, 1.0, 1.1], [3.0, 0.2, 1.0, 1.0, 1.0, 7.0], [9.0, 1.0, 0.9, 9.0, 9.0, 9.0]]
MASK = IDS >= 0
MASK[1, 5] = False


def batch_with(rho=RHO, ids=IDS, mask=MASK, **fields):
    """Old log-probs -1, rollout log-probs such that the ratio is `rho`."""
    old = torch.full(mask.shape, -1.0, dtype=torch.float64)
    fields = {"old_log_probs": old, "advantages": torch.ones_like(old)} | fields
    return make_batch(mask, Sequences(ids, int(ids.max()) + 1), rollout_log_probs=old - tensor(rho).log(), **fields)


def weights_of(batch, **settings):
    log_rho = log_ratios(batch.old_log_probs, batch.rollout_log_probs, batch.loss_mask)
    return importance_weights(log_rho, batch.loss_mask, batch.sequences, Correction(**settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"level": "token"}, [[0, 0.5, 2, 2, 1, 1.1], [2, 0.2, 1, 1, 1, 0], [0, 1, 0.9, 0, 0, 0]]),
        ({"level": "token", "high": 3.5}, [[0, 0.5, 2, 3.5, 1, 1.1], [3, 0.2, 1, 1, 1, 0], [0, 1, 0.9, 0, 0, 0]]),
        (
            {"level": "token", "low": 0.5, "high": 2.0},
            [[0, 0.5, 2, 0, 1, 1.1], [0, 0, 1, 1, 1, 0], [0, 1, 0.9, 0, 0, 0]],
        ),
        ({"level": "sequence"}, [[0, 2, 2, 2, 1.1, 1.1], [0.6] * 5 + [0], [0, 0.9, 0.9, 0, 0, 0]]),
        ({"level": "sequence", "low": 0.8, "high": 1.5}, [[0, 0, 0, 0, 1.1, 1.1], [0] * 6, [0, 0.9, 0.9, 0, 0, 0]]),
    ],
)
def test_weights_by_hand(settings, expected):
    weights = weights_of(batch_with(), **settings)
    torch.testing.assert_close(weights, tensor(expected), rtol=1e-12, atol=1e-12)
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("train", "rollout", "threshold", "weight"),
    [
        (-1.0, -1.0, 2.0, 1.0),
        (0.0, -100.0, 1e12, math.exp(20.0)),  # log-ratio clamped
        (-100.0, 0.0, 2.0, math.exp(-20.0)),
        (-math.inf, -1.0, 2.0, math.exp(-20.0)),
    ],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extreme_ratios(train, rollout, threshold, weight, level):
    mask = torch.tensor([[True, False]])
    batch = make_batch(mask, old_log_probs=tensor([[train, train]]), rollout_log_probs=tensor([[rollout, rollout]]))
    assert weights_of(batch, level=level, high=threshold).tolist() == [[pytest.approx(weight), 0.0]]


def test_a_long_product_stays_within_the_clamp():
    mask = torch.ones(2, 50, dtype=torch.bool)
    rho = [[3.0] * 50, [1 / 3] * 50]
    weights = weights_of(batch_with(rho, torch.arange(2)[:, None].expand(2, 50), mask), level="sequence", high=1e12)
    torch.testing.assert_close(weights[:, 0], tensor([math.exp(20), math.exp(-20)]), rtol=1e-12, atol=0)


# ---- rejection -----------------------------------------------------------------------------------------------


def reference_accepted(rho, ids, mask, name, low, high):
    """Definitions written out, token by token and sequence by sequence."""
    scope, _, kind = name.rpartition("_")
    estimate = {"k1": lambda r: -math.log(r), "k2": lambda r: math.log(r) ** 2 / 2, "k3": lambda r: r - 1 - math.log(r)}
    values = {}
    for row, column in mask.nonzero().tolist():
        values.setdefault(int(ids[row, column]), {})[row, column] = estimate[kind](rho[row][column])
    kept = torch.zeros_like(mask)
    for of_sample in values.values():
        v = list(of_sample.values())
        whole = {"seq_sum": sum(v), "seq_mean": sum(v) / len(v), "seq_max": max(v), "token": None}[scope]
        for place, own in of_sample.items():
            value = own if whole is None else whole
            kept[place] = low <= math.exp(-value) <= high if kind == "k1" else value <= high
    return kept


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_rule_keeps_exactly_what_its_definition_says(name, seed):
    generator = torch.Generator().manual_seed(seed)
    rho = torch.randn(4, 9, generator=generator, dtype=torch.float64).mul(0.7).exp()
    ids = torch.tensor(
        [[-1, 0, 0, 0, 1, 1, 1, 1, 1], [2] * 9, [3, 3, 3, 4, 4, 4, 5, 5, 5], [-1, 6, 6, 6, 6, -1, -1, -1, -1]]
    )
    mask = (ids >= 0) & (torch.rand(4, 9, generator=generator) > 0.2)
    low, high = (0.6, 1.5) if name.endswith("k1") else (None, 0.4)
    batch = batch_with(rho.tolist(), ids, mask)
    log_rho = log_ratios(batch.old_log_probs, batch.rollout_log_probs, mask)
    kept = accepted_tokens(log_rho, mask, batch.sequences, [Rule(name, low, high)])
    assert torch.equal(kept, reference_accepted(rho.tolist(), ids, mask, name, low, high))
    assert not kept[~mask].any()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule("token_k1", 0.5, 2.0), [[0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]]),
        (Rule("seq_sum_k1", 0.5, 2.0), [[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]]),
        (Rule("seq_mean_k1", 0.95, 1.1), [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]),
        (
            Rule("token_k2", None, math.log(2) ** 2 / 2 + 1e-9),
            [[0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]],
        ),
        (Rule("seq_max_k2", None, 0.01), [[0, 0, 0, 0, 1, 1], [0] * 6, [0, 1, 1, 0, 0, 0]]),
        (Rule("seq_max_k3", None, 1.7), [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]]),
    ],
)
def test_rules_by_hand(rule, expected):
    """The product of the first sequence is 4, its geometric mean 1.59; those of the third 0.6 and 0.90."""
    batch = batch_with()
    log_rho = log_ratios(batch.old_log_probs, batch.rollout_log_probs, MASK)
    assert accepted_tokens(log_rho, MASK, batch.sequences, [rule]).long().tolist() == expected


def test_every_rule_must_pass():
    batch = batch_with()
    log_rho = log_ratios(batch.old_log_probs, batch.rollout_log_probs, MASK)
    rules = [Rule("token_k1", 0.5, 2.0), Rule("seq_sum_k1", 0.5, 2.0)]
    both = accepted_tokens(log_rho, MASK, batch.sequences, rules)
    alone = [accepted_tokens(log_rho, MASK, batch.sequences, [rule]) for rule in rules]
    assert torch.equal(both, alone[0] & alone[1])
    assert not torch.equal(both, alone[0])


@pytest.mark.parametrize("name", ["token_k4", "seq_min_k2", "seq_sum"])
def test_unknown_rules_are_named(name):
    with pytest.raises(ValueError, match="to reject by"):
        accepted_tokens(
            torch.zeros(1, 1),
            torch.ones(1, 1, dtype=torch.bool),
            Sequences.of_rows(torch.ones(1, 1) > 0),
            [Rule(name, None, 1.0)],
        )


# ---- a correction of a whole buffer --------------------------------------------------------------------------


def test_normalised_weights_have_mean_one_over_tokens_or_sequences():
    batch = batch_with()
    (token,) = apply_correction([batch], Correction(level="token", batch_normalize=True), list)
    assert token.accepted is None
    assert token.weights[MASK].mean().item() == pytest.approx(1.0)
    raw = weights_of(batch, level="token")
    torch.testing.assert_close(token.weights, raw / raw[MASK].mean())
    (sequence,) = apply_correction([batch], Correction(level="sequence", batch_normalize=True), list)
    assert (
        sequence.weights[0, 1] + sequence.weights[0, 4] + sequence.weights[1, 0] + sequence.weights[2, 1]
    ).item() == pytest.approx(4.0)


@pytest.mark.parametrize("ranks", [[[0], [1], [2]], [[2, 0], [1]], [[0, 1, 2], []]])
def test_a_correction_does_not_depend_on_the_split(ranks):
    batch = batch_with()
    correction = Correction(level="sequence", batch_normalize=True, rules=(Rule("seq_mean_k3", None, 0.2),))
    (whole,) = apply_correction([batch], correction, list)
    parts = [lambda all_sum, r=r: apply_correction([select(batch, [i]) for i in r], correction, all_sum) for r in ranks]
    for rows, applied in zip(ranks, run_ranks(parts), strict=True):
        for row, mine in zip(rows, applied, strict=True):
            torch.testing.assert_close(mine.weights[0], whole.weights[row], rtol=0, atol=1e-12)
            assert torch.equal(mine.accepted[0], whole.accepted[row])


def test_weights_that_are_all_zero_are_not_divided_by_zero():
    correction = Correction(level="token", low=100.0, high=200.0, batch_normalize=True)
    (applied,) = apply_correction([batch_with()], correction, list)
    assert not applied.weights.any()


def test_bypass_mode_rejects_but_does_not_weigh():
    correction = Correction(level="token", batch_normalize=True, rules=(Rule("token_k1", 0.5, 2.0),), bypass_mode=True)
    assert correction.needs_whole_buffer and not correction.weighs
    (applied,) = apply_correction([batch_with()], correction, list)
    assert applied.weights is None and applied.accepted.sum() == 9


def test_old_log_probs_must_be_there():
    batch = batch_with()
    batch.old_log_probs = None
    with pytest.raises(ValueError, match="old log-probs"):
        apply_correction([batch], Correction(rules=(Rule("token_k1", 0.5, 2.0),)), list)


# ---- in the loss ---------------------------------------------------------------------------------------------


def gradient(loss_fn, log_probs, batch):
    leaf = log_probs.clone().requires_grad_()
    loss, sums = loss_fn(leaf, batch)
    loss.backward()
    return loss.item(), leaf.grad, policy.finalise(unstack(*stack([sums])))


@pytest.mark.parametrize("settings", [{"high": 2.0}, {"low": 0.7, "high": 1.4}])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_multiply_exactly_their_tokens(level, settings):
    log_probs, batch = random_batch(old=False)
    correction = Correction(level=level, **settings)
    _, weighted, _ = gradient(PolicyLoss(aggregation=Aggregation(), correction=correction), log_probs, batch)
    _, plain, _ = gradient(PolicyLoss(aggregation=Aggregation()), log_probs, batch)
    log_rho = log_ratios(log_probs, batch.rollout_log_probs, batch.loss_mask)
    weights = importance_weights(log_rho, batch.loss_mask, batch.sequences, correction)
    torch.testing.assert_close(weighted, plain * weights, rtol=1e-12, atol=0)
    assert not torch.equal(weighted, plain)


def test_rejected_tokens_leave_loss_gradient_and_denominators():
    log_probs, batch = random_batch(seed=5)
    correction = Correction(rules=(Rule("seq_mean_k1", 0.9, 1.3), Rule("token_k2", None, 0.5)))
    (applied,) = apply_correction([batch], correction, list)
    batch.accepted = applied.accepted
    kept = batch.loss_mask & applied.accepted
    assert 0 < kept.sum() < batch.loss_mask.sum()
    only = select(batch, slice(None))
    only.loss_mask, only.accepted = kept, None
    for mode in ("token-mean", "seq-mean-token-mean"):
        agg = Aggregation(mode, int(kept.sum()), int((batch.sequences.sum(kept) > 0).sum()))
        loss, grad, metrics = gradient(PolicyLoss(aggregation=agg, correction=correction), log_probs, batch)
        expected_loss, expected, plain = gradient(PolicyLoss(aggregation=agg), log_probs, only)
        assert loss == expected_loss
        assert torch.equal(grad, expected)
        assert metrics["rollout_corr/rs_masked_fraction"] == pytest.approx(
            1 - kept.sum().item() / batch.loss_mask.sum().item()
        )
        assert metrics["actor/loss_tokens"] == kept.sum()
        assert metrics["actor/pg_loss"] == pytest.approx(plain["actor/pg_loss"])
        assert metrics["rollout_corr/kl"] != pytest.approx(plain["rollout_corr/kl"])  # of all tokens, not of those kept


def test_all_rejected_is_a_loss_of_zero_with_its_metrics():
    log_probs, batch = random_batch()
    batch.accepted = torch.zeros_like(batch.loss_mask)
    loss, grad, metrics = gradient(
        PolicyLoss(aggregation=Aggregation(tokens=0, sequences=0), kl_loss_coef=1.0), log_probs, batch
    )
    assert loss == 0.0 and not grad.any()
    assert metrics["rollout_corr/rs_masked_fraction"] == 1.0
    assert "actor/pg_loss" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_bypass_mode_takes_the_engine_log_probs_as_the_old_ones():
    log_probs, batch = random_batch()
    bypass = Correction(level="token", bypass_mode=True)
    loss, grad, _ = gradient(PolicyLoss(aggregation=Aggregation(tokens=11), correction=bypass), log_probs, batch)
    same = select(batch, slice(None))
    same.old_log_probs = batch.rollout_log_probs
    expected, expected_grad, _ = gradient(PolicyLoss(aggregation=Aggregation(tokens=11)), log_probs, same)
    assert loss == expected
    assert torch.equal(grad, expected_grad)
    batch.old_log_probs = None
    _, _, metrics = gradient(PolicyLoss(aggregation=Aggregation(tokens=11), correction=bypass), log_probs, batch)
    difference = (batch.rollout_log_probs - log_probs)[batch.loss_mask].mean().item()
    assert metrics["rollout_corr/kl"] == pytest.approx(difference)


@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("old", [True, False])
def test_reinforce_weighs_the_advantage_by_the_policy_now_over_the_engines(level, old):
    """Whatever log-probs were computed at the buffer's start, for rejection say."""
    log_probs, batch = random_batch(old=old)
    correction = Correction(level=level, high=1.5, bypass_mode=True, reinforce=True)
    loss, grad, metrics = gradient(
        PolicyLoss(aggregation=Aggregation(tokens=11), correction=correction), log_probs, batch
    )
    weights = torch.ones_like(log_probs)
    if level:
        log_rho = log_ratios(log_probs, batch.rollout_log_probs, batch.loss_mask)
        weights = importance_weights(log_rho, batch.loss_mask, batch.sequences, correction)
    expected = torch.where(batch.loss_mask, -weights * batch.advantages / 11, 0.0)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=0)
    assert loss == pytest.approx((expected * log_probs).sum().item())
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/ppo_kl"] == pytest.approx(
        (batch.rollout_log_probs - log_probs)[batch.loss_mask].mean().item()
    )


def test_reinforce_with_normalised_weights_takes_those_of_the_buffer():
    correction = Correction(level="token", batch_normalize=True, bypass_mode=True, reinforce=True)
    assert correction.weighs and correction.needs_whole_buffer
    (applied,) = apply_correction([batch_with()], correction, list)
    assert applied.weights[MASK].mean().item() == pytest.approx(1.0)


# ---- metrics -------------------------------------------------------------------------------------------------


def reference_metrics(train, batch, correction, weighed):
    """Definitions written out with plain floats, one token and one sequence at a time."""
    by_sample = {}
    for row, column in batch.loss_mask.nonzero().tolist():
        pair = (train[row, column].item(), batch.rollout_log_probs[row, column].item())
        by_sample.setdefault(int(batch.sequences.ids[row, column]), []).append(pair)
    rho, ratios = [], []
    for pairs in by_sample.values():
        logs = [max(-20.0, min(20.0, t - r)) for t, r in pairs]
        rho += [math.exp(x) for x in logs]
        product = math.exp(max(-20.0, min(20.0, math.fsum(logs))))
        ratios += [product if correction.level == "sequence" else math.exp(x) for x in logs]
    high, low = correction.high, correction.low or 1 / correction.high
    weights = ratios
    if weighed and correction.low is None:
        weights = [min(r, high) for r in ratios]
    elif weighed:
        weights = [r if low <= r <= high else 0.0 for r in ratios]
    n = len(rho)
    mean = math.fsum(weights) / n
    train_nll = [-math.fsum(t for t, _ in pairs) / len(pairs) for pairs in by_sample.values()]
    rollout_nll = [-math.fsum(r for _, r in pairs) / len(pairs) for pairs in by_sample.values()]
    products = [math.exp(max(-20.0, min(20.0, math.fsum(t - r for t, r in pairs)))) for pairs in by_sample.values()]
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(math.fsum((w - mean) ** 2 for w in weights) / n),
        "rollout_is_min": min(weights),
        "rollout_is_max": max(weights),
        "rollout_is_eff_sample_size": math.fsum(weights) ** 2 / (n * math.fsum(w * w for w in weights)),
        "ratio_fraction_high": sum(r > high for r in ratios) / n,
        "ratio_fraction_low": sum(r < low for r in ratios) / n,
        "rs_masked_fraction": 0.0,
        "kl": math.fsum(-math.log(r) for r in rho) / n,
        "k3_kl": math.fsum(r - 1 - math.log(r) for r in rho) / n,
        "chi2_token": math.fsum(r * r for r in rho) / n - 1,
        "chi2_seq": math.fsum(p * p for p in products) / len(products) - 1,
        "ppl_ratio": math.fsum(math.exp(a - b) for a, b in zip(train_nll, rollout_nll, strict=True)) / len(train_nll),
        "training_ppl": math.fsum(map(math.exp, train_nll)) / len(train_nll),
        "rollout_ppl": math.fsum(map(math.exp, rollout_nll)) / len(rollout_nll),
    }


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize(
    "correction",
    [
        Correction(level="token", high=1.5),
        Correction(level="token", low=0.7, high=1.5),
        Correction(level="sequence", high=1.5),
        Correction(level="sequence", low=0.3, high=4.0),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_metrics_equal_the_reference(weighed, correction, shared):
    log_probs, batch = random_batch(rows=6, length=12, seed=3)
    if shared:  # two samples in each row
        batch.sequences = Sequences(torch.arange(6)[:, None] * 2 + (torch.arange(12) >= 5).long(), 12)
    log_rho = log_ratios(log_probs, batch.rollout_log_probs, batch.loss_mask)
    weights = importance_weights(log_rho, batch.loss_mask, batch.sequences, correction) if weighed else None

    def sums_of(b, train, w):
        sums = rollout_correction.correction_sums(
            train, b.rollout_log_probs, b.loss_mask, b.sequences, correction=correction, weights=w
        )
        return {name: float(value) for name, value in sums.items()}

    result = rollout_correction.finalise(sums_of(batch, log_probs, weights))
    expected = reference_metrics(log_probs, batch, correction, weighed)
    assert result.keys() == expected.keys()
    assert result == pytest.approx(expected, rel=1e-9)
    parts = [
        sums_of(select(batch, rows), log_probs[rows], None if weights is None else weights[rows])
        for rows in ([0, 3], [1], [2, 4, 5])
    ]
    assert rollout_correction.finalise(combine(parts)) == pytest.approx(expected, rel=1e-9)


def test_metrics_by_hand():
    """Two tokens with rho 2 and 1/2 in one sequence: product 1."""
    train, rollout = tensor([[math.log(0.5), math.log(0.25)]]), tensor([[math.log(0.25), math.log(0.5)]])
    mask = torch.tensor([[True, True]])
    sums = rollout_correction.correction_sums(
        train, rollout, mask, Sequences.of_rows(mask), correction=Correction(high=1.5)
    )
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


def test_metrics_of_impossible_tokens_are_finite():
    log_probs, batch = random_batch()
    log_probs[batch.loss_mask] = -math.inf
    sums = rollout_correction.correction_sums(
        log_probs, batch.rollout_log_probs, batch.loss_mask, batch.sequences, correction=Correction()
    )
    result = rollout_correction.finalise({name: float(value) for name, value in sums.items()})
    assert all(math.isfinite(value) for value in result.values())
    assert result["kl"] == pytest.approx(20.0)
