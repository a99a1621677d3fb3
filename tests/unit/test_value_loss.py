"""The critic's objective: by hand, against a plain loop in float64, and in any split."""

from __future__ import annotations

import pytest
import torch
from loss_batches import make_batch, random_batch, select, tensor

from psrl.algorithms.metrics import combine
from psrl.algorithms.value import ValueLoss, finalise

pytestmark = pytest.mark.unit


def with_targets(batch, values, returns, accepted=None):
    batch.values, batch.returns, batch.accepted = values, returns, accepted
    batch.trained = batch.loss_mask if accepted is None else batch.loss_mask & accepted
    return batch


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope", "clipped"),
    [
        (1.0, 1.0, 3.0, 0.5, 2.0, -2.0, 0),  # not moved yet
        (1.4, 1.0, 3.0, 0.5, 1.28, -1.6, 0),  # inside the range
        (1.6, 1.0, 3.0, 0.5, 1.125, 0.0, 1),  # towards the return, beyond it: held at 1.5
        (0.4, 1.0, 3.0, 0.5, 3.38, -2.6, 0),  # away from it: all of the loss
        (1.0, 1.0, -1.0, 0.5, 2.0, 2.0, 0),
        (0.25, 1.0, -1.0, 0.5, 1.125, 0.0, 1),
        (1.6, 1.0, 3.0, None, 0.98, -1.4, 0),  # no clip
        (3.0, 0.0, 3.0, 0.5, 3.125, 0.0, 1),  # exact, but too fast
        (3.0, 3.0, 3.0, 0.5, 0.0, 0.0, 0),
    ],
)
def test_one_token_by_hand(value, old, target, clip, loss, slope, clipped):
    values = tensor([[value]]).requires_grad_()
    batch = with_targets(make_batch(torch.tensor([[True]])), tensor([[old]]), tensor([[target]]))
    result, sums = ValueLoss(tokens=1, clip=clip)(values, batch)
    result.backward()
    assert result.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(slope)
    assert sums["critic/sums/clipped"].item() == clipped


def random_values(seed, accepted=False):
    """(values now, batch): float64, ragged masks, NaN where nothing is trained."""
    _, batch = random_batch(seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    now, old, target = torch.randn(3, *batch.loss_mask.shape, generator=generator, dtype=torch.float64)
    keep = torch.rand(batch.loss_mask.shape, generator=generator) > 0.3 if accepted else None
    with_targets(batch, old, target, keep)
    return torch.where(batch.trained, now, torch.nan), batch


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("accepted", [False, True])
def test_against_a_plain_loop(clip, accepted):
    values, batch = random_values(3, accepted)
    values.requires_grad_()
    places = [tuple(place) for place in batch.trained.nonzero().tolist()]
    total, gone, explained = 0.0, 0, []
    for place in places:
        v, old, target = values[place].item(), batch.values[place].item(), batch.returns[place].item()
        loss = (v - target) ** 2
        if clip is not None:
            near = min(max(v, old - clip), old + clip)
            gone += (near - target) ** 2 > loss
            loss = max(loss, (near - target) ** 2)
        total += loss / 2
        explained.append((target, target - old))
    result, sums = ValueLoss(tokens=len(places), clip=clip)(values, batch)
    result.backward()
    assert result.item() == pytest.approx(total / len(places), rel=1e-12)
    assert not values.grad[~batch.trained].any() and values.grad.isfinite().all()
    metrics = finalise({name: value.item() for name, value in sums.items()})
    targets, missed = tensor(explained).unbind(1)
    assert metrics == pytest.approx(
        {
            "critic/vf_loss": total / len(places),
            "critic/vf_clipfrac": gone / len(places),
            "critic/values/mean": (targets - missed).mean().item(),
            "critic/returns/mean": targets.mean().item(),
            "critic/vf_explained_var": 1 - (missed.var() / targets.var()).item(),
        }
    )


def test_the_gradient_is_that_of_finite_differences():
    values, batch = random_values(5)
    values = torch.where(batch.trained, values, 0.0).requires_grad_()
    loss = ValueLoss(tokens=7, clip=0.4)
    assert torch.autograd.gradcheck(lambda v: loss(v, batch)[0], (values,), eps=1e-7, atol=1e-5)


def test_parts_add_up_to_the_whole():
    values, batch = random_values(7)
    loss = ValueLoss(tokens=int(batch.trained.sum()), clip=0.3)
    whole, sums = loss(values, batch)
    parts = [loss(values[rows], select(batch, rows)) for rows in (slice(0, 2), slice(2, 3), slice(3, 5))]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item(), rel=1e-12)
    added = combine({name: value.item() for name, value in part.items()} for _, part in parts)
    assert finalise(added) == pytest.approx(finalise({name: value.item() for name, value in sums.items()}), rel=1e-9)


def test_nothing_to_learn_from():
    values, batch = random_values(1)
    batch.trained = torch.zeros_like(batch.loss_mask)
    values = torch.zeros_like(values, requires_grad=True)
    loss, sums = ValueLoss(tokens=0, clip=0.5)(values, batch)
    loss.backward()
    assert loss.item() == 0.0 and not values.grad.any()
    assert finalise({name: value.item() for name, value in sums.items()}) == {}


def test_equal_returns_leave_nothing_to_explain():
    _, batch = random_batch(seed=2)
    with_targets(batch, torch.zeros_like(batch.advantages), torch.ones_like(batch.advantages))
    _, sums = ValueLoss(tokens=3)(torch.zeros_like(batch.advantages), batch)
    assert "critic/vf_explained_var" not in finalise({name: value.item() for name, value in sums.items()})


def test_without_targets_it_says_so():
    with pytest.raises(ValueError, match="values and returns"):
        ValueLoss(tokens=1)(tensor([[0.0]]), make_batch(torch.tensor([[True]])))
