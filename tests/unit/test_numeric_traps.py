"""Whatever comes in (equal or missing rewards, impossible tokens, ratios without bound, nothing accepted), what goes out is finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import make_batch, tensor

from psrl.algorithms import policy
from psrl.algorithms.advantages import ESTIMATORS, AdvantageOptions, SampleRewards
from psrl.algorithms.aggregation import LOSS_AGG_MODES, Aggregation
from psrl.algorithms.kl import KL_TYPES, KLControl
from psrl.algorithms.metrics import stack, unstack
from psrl.algorithms.policy import PolicyLoss
from psrl.algorithms.policy_losses import POLICY_LOSSES
from psrl.algorithms.rewards import group_rewards
from psrl.algorithms.rollout_correction import Correction, Rule, apply_correction
from psrl.algorithms.sequences import Sequences
from psrl.config.correction import RULES

pytestmark = pytest.mark.unit

INF, NAN = math.inf, math.nan
REWARDS = st.sampled_from([None, NAN, INF, -INF, 0.0, 0.1, 0.1 + 1e-17, 1.0, -3.0, 1e6])
LOG_PROBS = st.sampled_from([-INF, -1e4, -30.0, -1.0, -1e-7, 0.0])
few = settings(max_examples=60)


@st.composite
def buffers(draw):
    """(rewards, a batch of one sample a row) of up to three groups; samples of 0 to 3 tokens, some of them not trained."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    read = [group_rewards(draw(st.lists(REWARDS, min_size=n, max_size=n)), least_valid=1) for n in sizes]
    valid = torch.tensor([v for group in read for v in group.valid.tolist()])
    outcome = tensor([r for group in read for r in group.rewards.tolist()])
    lengths = torch.tensor([draw(st.integers(0, 3)) for _ in valid])
    response = torch.arange(1, 5) <= lengths[:, None]
    trained = torch.tensor([draw(st.lists(st.booleans(), min_size=4, max_size=4)) for _ in valid])
    values = torch.where(response, draw(st.sampled_from([0.0, 0.1, -1e6])), NAN).double()
    ids = torch.where(response, torch.arange(len(valid))[:, None], -1)
    batch = make_batch(response & trained & valid[:, None], Sequences(ids, len(valid)), values=values)
    group = torch.tensor([g for g, n in enumerate(sizes) for _ in range(n)])
    return SampleRewards(outcome=outcome, valid=valid, group=group, baseline=torch.full_like(outcome, 0.1)), batch


@few
@given(buffers(), st.sampled_from(list(ESTIMATORS)), st.booleans())
def test_advantages_are_finite_and_zero_where_nothing_is_trained(buffer, name, by_std):
    rewards, batch = buffer
    estimated = ESTIMATORS[name](rewards, [batch], AdvantageOptions(norm_by_std=by_std, gamma=0.9, lam=0.9), list)
    for grid in estimated.advantages + (estimated.returns or []):
        assert grid.isfinite().all() and not grid[~batch.loss_mask].any()
    if name in ("grpo", "rloo"):
        for group in rewards.group.unique().tolist():
            members = rewards.valid & (rewards.group == group)
            if len(rewards.outcome[members].unique()) < 2:  # alone, or all alike
                assert not estimated.advantages[0][members].any()


@st.composite
def scored(draw, rows=3, length=3):
    """(log-probs, batch) with impossible tokens of every policy, masks and acceptance of any kind."""

    def grid(values, shape=(rows, length)):
        return torch.tensor(draw(st.lists(values, min_size=rows * length, max_size=rows * length))).view(shape)

    named = {name: grid(LOG_PROBS).double() for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")}
    batch = make_batch(
        grid(st.booleans()),
        advantages=grid(st.sampled_from([-2.0, 0.0, 1.0])).double(),
        accepted=draw(st.sampled_from([None, torch.zeros(rows, length, dtype=torch.bool), grid(st.booleans())])),
        **named,
    )
    if draw(st.booleans()):
        batch.old_log_probs = None
    return grid(LOG_PROBS).double(), batch


@few
@given(
    scored(),
    st.sampled_from([*POLICY_LOSSES, "reinforce"]),
    st.sampled_from(LOSS_AGG_MODES),
    st.sampled_from(list(KL_TYPES)),
    st.sampled_from([None, "token", "sequence"]),
)
def test_losses_gradients_and_metrics_are_finite(inputs, mode, agg, kl, level):
    log_probs, batch = inputs
    reinforce = mode == "reinforce"
    loss_fn = PolicyLoss(
        aggregation=Aggregation(agg, 3, 2, 4.0),
        loss_mode="vanilla" if reinforce else mode,
        correction=Correction(level=level, bypass_mode=reinforce, reinforce=reinforce),
        kl_loss_coef=0.1,
        kl_loss_type=kl,
    )
    leaf = log_probs.clone().requires_grad_()
    loss, sums = loss_fn(leaf, batch)
    loss.backward()
    trained = batch.loss_mask if batch.accepted is None else batch.loss_mask & batch.accepted
    assert loss.isfinite() and leaf.grad.isfinite().all()
    assert not leaf.grad[~trained].any() and not leaf.grad[log_probs == -INF].any()
    assert all(map(math.isfinite, policy.finalise(unstack(*stack([sums]))).values()))


@few
@given(scored(), st.sampled_from(RULES), st.sampled_from(["token", "sequence"]), st.booleans())
def test_corrections_are_finite_and_normalised_weights_have_mean_one_or_are_all_zero(inputs, rule, level, band):
    log_probs, batch = inputs
    batch.old_log_probs = log_probs
    bound = Rule(rule, 0.5 if rule.endswith("k1") else None, 2.0)
    correction = Correction(level=level, low=0.5 if band else None, batch_normalize=True, rules=(bound,))
    (applied,) = apply_correction([batch], correction, list)
    assert applied.weights.isfinite().all() and not applied.weights[~batch.loss_mask].any()
    assert not applied.accepted[~batch.loss_mask].any()
    if level == "token" and applied.weights.any():
        assert applied.weights[batch.loss_mask].mean().item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kl", "samples", "factor"), [(NAN, 10, 1.0), (INF, 10, 1.0), (0.0, 10**6, 0.8), (9.0, 10**6, 1.2)]
)
def test_the_adaptive_kl_coefficient_stays_positive_and_a_number(kl, samples, factor):
    assert KLControl(coefficient=2.0, horizon=100).after(kl, samples).coefficient == pytest.approx(2.0 * factor)
