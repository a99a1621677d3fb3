"""Policy losses and their aggregation: by hand, against plain loops in float64, and by finite differences."""

import math

import pytest
import torch
from loss_batches import make_batch, random_batch, run_ranks, select, tensor

from psrl.algorithms import policy
from psrl.algorithms.aggregation import LOSS_AGG_MODES, Aggregation
from psrl.algorithms.metrics import combine, stack, unstack
from psrl.algorithms.policy import PolicyLoss
from psrl.algorithms.policy_losses import POLICY_LOSSES, Clip
from psrl.algorithms.sequences import Sequences
from psrl.algorithms.tensors import clamped_log_ratio

pytestmark = pytest.mark.unit


def one_token(mode, log_ratio, advantage, clip):
    """(loss, gradient by the log-prob, clipped, bounded by the dual clip) of a single token with log-prob -1."""
    log_probs = tensor([[-1.0]]).requires_grad_()
    batch = make_batch(
        torch.tensor([[True]]), old_log_probs=tensor([[-1.0 - log_ratio]]), advantages=tensor([[advantage]])
    )
    loss_fn = PolicyLoss(aggregation=Aggregation(), loss_mode=mode, clip=clip)
    loss, sums = loss_fn(log_probs, batch)
    loss.backward()
    return (
        loss.item(),
        log_probs.grad.item(),
        sums["actor/sums/clipped"].item(),
        sums["actor/sums/clipped_dual"].item(),
    )


@pytest.mark.parametrize(
    ("mode", "ratio", "advantage", "loss", "slope", "clipped", "dual"),
    [
        ("vanilla", 1.1, 1.0, -1.1, -1.1, 0, 0),  # inside the range
        ("vanilla", 1.5, 1.0, -1.3, 0.0, 1, 0),  # gain capped at 1 + high
        ("vanilla", 1.5, -1.0, 1.5, 1.5, 0, 0),  # a loss is not
        ("vanilla", 0.5, 1.0, -0.5, -0.5, 0, 0),
        ("vanilla", 0.5, -1.0, 0.8, 0.0, 1, 0),  # capped at 1 - low
        ("vanilla", 1.0, 2.0, -2.0, -2.0, 0, 0),
        ("vanilla", 1.0, 0.0, 0.0, 0.0, 0, 0),
        ("vanilla", 5.0, -1.0, 3.0, 0.0, 0, 1),  # the dual clip's bound
        ("vanilla", 5.0, -2.0, 6.0, 0.0, 0, 1),
        ("vanilla", 2.9, -1.0, 2.9, 2.9, 0, 0),  # below it
        ("vanilla", 1e300, 1.0, -1.3, 0.0, 1, 0),  # would overflow without the clamp
        ("vanilla", 1e300, -1.0, 3.0, 0.0, 0, 1),
        ("gspo", 1.1, 1.0, -1.1, -1.1, 0, 0),
        ("gspo", 1.5, 1.0, -1.3, 0.0, 1, 0),
        ("gspo", 5.0, -1.0, 3.0, 0.0, 0, 1),
        ("cispo", 1.1, 1.0, 1.1, -1.1, 0, 0),  # -r A log p with log p = -1
        ("cispo", 1.5, 1.0, 1.3, -1.3, 1, 0),  # the weight is clipped, the gradient stays
        ("cispo", 0.5, -1.0, -0.8, 0.8, 1, 0),
        ("cispo", 5.0, -1.0, -1.3, 1.3, 1, 0),
    ],
)
def test_one_token_by_hand(mode, ratio, advantage, loss, slope, clipped, dual):
    value = one_token(mode, math.log(ratio), advantage, Clip(low=0.2, high=0.3, dual=3.0))
    assert value == (pytest.approx(loss), pytest.approx(slope), clipped, dual)


def test_without_a_dual_clip_a_bad_token_has_no_bound():
    assert one_token("vanilla", math.log(5), -1.0, Clip())[0] == pytest.approx(5.0)


# ---- the whole objective against plain loops -----------------------------------------------------------------

CLIP = Clip(low=0.2, high=0.28, dual=2.0)


def reference_token(mode, log_prob, ratio, advantage, clip):
    inside = min(max(ratio, 1 - clip.low), 1 + clip.high)
    if mode == "cispo":
        return -inside * advantage * log_prob
    value = -min(advantage * ratio, advantage * inside)
    return min(value, -clip.dual * advantage) if advantage < 0 and clip.dual else value


def reference_loss(mode, agg, log_probs, batch, clip, scale=1.0):
    """Sequences one after the other, tokens one after the other."""
    by_sample: dict[int, list[tuple[float, float, float]]] = {}
    for row, column in batch.loss_mask.nonzero().tolist():
        entry = (log_probs[row, column], batch.old_log_probs[row, column], batch.advantages[row, column])
        by_sample.setdefault(int(batch.sequences.ids[row, column]), []).append(tuple(map(float, entry)))
    token_losses = {}
    for sample, entries in by_sample.items():
        mean = math.exp(sum(new - old for new, old, _ in entries) / len(entries))
        token_losses[sample] = [
            reference_token(mode, new, mean if mode == "gspo" else math.exp(new - old), a, clip)
            for new, old, a in entries
        ]
    sums = {s: math.fsum(losses) for s, losses in token_losses.items()}
    match agg:
        case "token-mean":
            return math.fsum(sums.values()) / sum(map(len, token_losses.values()))
        case "seq-mean-token-sum":
            return math.fsum(sums.values()) / len(sums)
        case "seq-mean-token-mean":
            return math.fsum(total / len(token_losses[s]) for s, total in sums.items()) / len(sums)
        case "seq-mean-token-sum-norm":
            return math.fsum(sums.values()) / len(sums) / scale


def aggregation_of(agg, batch, scale=1.0):
    present = batch.sequences.sum(batch.loss_mask) > 0
    return Aggregation(agg, int(batch.loss_mask.sum()), int(present.sum()), scale)


def shared_rows_batch(seed=1):
    """Two samples share the first row, two the third."""
    log_probs, batch = random_batch(rows=4, length=8, seed=seed)
    batch.sequences = Sequences(
        torch.tensor([[-1, 0, 0, 0, 1, 1, 1, 1], [2] * 8, [-1, -1, 3, 3, 4, 4, 4, -1], [5] * 8]), 6
    )
    batch.loss_mask = (torch.arange(32).view(4, 8) % 3 > 0) & (batch.sequences.ids >= 0)
    return log_probs, batch


@pytest.mark.parametrize("agg", LOSS_AGG_MODES)
@pytest.mark.parametrize("mode", list(POLICY_LOSSES))
@pytest.mark.parametrize("make", [random_batch, shared_rows_batch])
def test_every_loss_under_every_aggregation_equals_the_reference(mode, agg, make):
    log_probs, batch = make()
    loss_fn = PolicyLoss(aggregation=aggregation_of(agg, batch, 7.0), loss_mode=mode, clip=CLIP)
    loss, sums = loss_fn(log_probs, batch)
    expected = reference_loss(mode, agg, log_probs, batch, CLIP, 7.0)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert policy.finalise(unstack(*stack([sums])))["actor/pg_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("agg", LOSS_AGG_MODES)
def test_gradient_of_ppo_by_finite_differences(agg):
    log_probs, batch = shared_rows_batch()
    loss_fn = PolicyLoss(
        aggregation=aggregation_of(agg, batch, 3.0), clip=CLIP, kl_loss_coef=0.1, kl_loss_type="k3", entropy_coeff=0.2
    )
    entropy = log_probs.square()
    inputs = (log_probs.clone().requires_grad_(), entropy.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, h: loss_fn(x, batch, h)[0], inputs, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["gspo", "cispo"])
def test_gradients_with_stopped_parts(mode):
    """What finite differences cannot see. GSPO: s A / |y| within the range, with the same value for each token of a sequence.
    CISPO: weight times A on every token."""
    log_probs, batch = random_batch(seed=4)
    agg = aggregation_of("seq-mean-token-mean", batch)
    leaf = log_probs.clone().requires_grad_()
    PolicyLoss(aggregation=agg, loss_mode=mode, clip=Clip(low=0.2, high=0.2))(leaf, batch)[0].backward()
    for row in range(len(log_probs)):
        columns = batch.loss_mask[row].nonzero().flatten().tolist()
        logs = [(log_probs - batch.old_log_probs)[row, c].item() for c in columns]
        for column, log in zip(columns, logs, strict=True):
            ratio = math.exp(sum(logs) / len(logs) if mode == "gspo" else log)
            advantage = batch.advantages[row, column].item()
            inside = min(max(ratio, 0.8), 1.2)
            expected = -advantage * (inside if mode == "cispo" else ratio)
            if mode == "gspo" and advantage * inside < advantage * ratio:
                expected = 0.0
            assert leaf.grad[row, column].item() == pytest.approx(expected / len(columns) / agg.sequences, abs=1e-12)
    assert not leaf.grad[~batch.loss_mask].any()


# ---- splits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(POLICY_LOSSES))
@pytest.mark.parametrize("agg", LOSS_AGG_MODES)
@pytest.mark.parametrize("splits", [[[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 1], [0], [2, 3]]])
def test_gradient_and_metrics_do_not_depend_on_the_split(mode, agg, splits):
    log_probs, batch = random_batch()
    loss_fn = PolicyLoss(
        aggregation=aggregation_of(agg, batch, 5.0),
        loss_mode=mode,
        clip=CLIP,
        kl_loss_coef=0.3,
        entropy_coeff=0.1,
    )
    entropy = log_probs.square()

    def accumulate(parts):
        leaf = log_probs.clone().requires_grad_()
        sums = []
        for rows in parts:
            loss, part = loss_fn(leaf[rows], select(batch, rows), entropy[rows])
            loss.backward()
            sums.append(part)
        on_device = policy.finalise(unstack(*stack(sums)))
        return leaf.grad, on_device, policy.finalise(combine(unstack(*stack([part])) for part in sums))

    gradient, on_device, on_host = accumulate(splits)
    expected_gradient, expected, _ = accumulate([list(range(5))])
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)
    assert on_device == pytest.approx(expected, rel=1e-9)
    assert on_host == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("agg", LOSS_AGG_MODES)
def test_padding_changes_nothing(agg):
    log_probs, batch = random_batch()
    wide = {
        k: torch.nn.functional.pad(v, (0, 3), value=False if v.dtype == torch.bool else math.nan)
        for k, v in vars(batch).items()
        if isinstance(v, torch.Tensor)
    }
    padded = make_batch(
        wide.pop("loss_mask"), Sequences(torch.nn.functional.pad(batch.sequences.ids, (0, 3), value=-1), 5), **wide
    )
    results = []
    for x, b in ((log_probs, batch), (torch.nn.functional.pad(log_probs, (0, 3), value=-math.inf), padded)):
        leaf = x.clone().requires_grad_()
        loss, _ = PolicyLoss(aggregation=aggregation_of(agg, batch), kl_loss_coef=0.5)(leaf, b)
        loss.backward()
        results.append((loss.item(), leaf.grad))
    assert results[1][0] == results[0][0]
    assert torch.equal(results[1][1][:, :-3], results[0][1])
    assert not results[1][1][:, -3:].any()


def test_token_mean_is_over_all_tokens_not_a_mean_of_means():
    """One token with loss 1 beside nine with loss 0: 0.1, whatever the split."""
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 0], mask[1] = True, True
    advantages = torch.zeros(2, 9)
    advantages[0, 0] = -1.0
    batch = make_batch(mask, advantages=advantages, rollout_log_probs=torch.zeros(2, 9))
    loss_fn = PolicyLoss(aggregation=Aggregation(tokens=10))
    for splits in ([[0, 1]], [[0], [1]]):
        losses = [loss_fn(torch.zeros(len(rows), 9), select(batch, rows))[0].item() for rows in splits]
        assert sum(losses) == pytest.approx(0.1)


@pytest.mark.parametrize("agg", LOSS_AGG_MODES)
def test_shares_add_up_to_the_denominator(agg):
    _, batch = shared_rows_batch()
    aggregation = aggregation_of(agg, batch, 7.0)
    parts = [select(batch, [row]) for row in range(4)]
    shares = [float(aggregation.share(p.loss_mask, p.sequences)) for p in parts]
    assert sum(shares) == aggregation.denominator
    (total,) = run_ranks(
        [lambda all_sum, s=shares: all_sum([sum(s[:2])]), lambda all_sum, s=shares: all_sum([sum(s[2:])])]
    )[0]
    assert total == aggregation.denominator


def test_an_unknown_aggregation_is_named():
    _, batch = random_batch()
    with pytest.raises(ValueError, match="loss_agg_mode is 'mean'"):
        Aggregation("mean").numerator(batch.advantages, batch.loss_mask, batch.sequences)


# ---- traps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("mode", list(POLICY_LOSSES))
@pytest.mark.parametrize("agg", LOSS_AGG_MODES)
def test_all_masked_batch_gives_exactly_zero_and_finite_gradients(poison, old, mode, agg):
    log_probs, batch = random_batch(old=old)
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    for name in ("advantages", "rollout_log_probs", "ref_log_probs"):
        setattr(batch, name, torch.full_like(log_probs, poison))
    log_probs.requires_grad_()
    loss_fn = PolicyLoss(aggregation=Aggregation(agg, 0, 0, 4.0), loss_mode=mode, kl_loss_coef=1.0, entropy_coeff=1.0)
    loss, sums = loss_fn(log_probs, batch, torch.full_like(log_probs, poison))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(log_probs.grad, torch.zeros_like(log_probs))
    combined = unstack(*stack([sums]))
    assert policy.finalise(combined) == {}
    assert combined["actor/sums/loss"] == 0.0


@pytest.mark.parametrize("mode", ["vanilla", "gspo"])
def test_a_log_prob_of_minus_infinity_costs_no_gradient(mode):
    log_probs, batch = random_batch(seed=2)
    row, column = batch.loss_mask.nonzero()[0].tolist()
    log_probs[row, column] = -math.inf
    leaf = log_probs.clone().requires_grad_()
    loss, sums = PolicyLoss(aggregation=aggregation_of("token-mean", batch), loss_mode=mode)(leaf, batch)
    loss.backward()
    others = torch.ones_like(batch.loss_mask)
    others[row] = False
    assert math.isfinite(loss.item())
    assert torch.isfinite(leaf.grad).all()
    assert leaf.grad[row, column] == 0
    assert leaf.grad[others].any()
    assert all(math.isfinite(float(value)) for value in sums.values())


def test_log_ratios_are_clamped_and_masked():
    ratio = clamped_log_ratio(
        tensor([[0.0, -500.0, 1.0, math.nan]]),
        tensor([[-100.0, 0.0, 0.5, 0.0]]),
        torch.tensor([[True, True, True, False]]),
    )
    assert ratio.tolist() == [[20.0, -20.0, 0.5, 0.0]]


# ---- which log-probs are the old ones ------------------------------------------------------------------------


def test_without_old_log_probs_the_ratio_is_one_and_its_gradient_that_of_the_log_probs():
    log_probs, batch = random_batch(old=False, dtype=torch.float32)
    log_probs.requires_grad_()
    loss, sums = PolicyLoss(aggregation=Aggregation(tokens=10))(log_probs, batch)
    loss.backward()
    expected = torch.where(batch.loss_mask, -batch.advantages / 10, 0.0)
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-6, atol=0)
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-5)
    assert sums["actor/sums/clipped"] == 0
    assert sums["actor/sums/kl"] == 0


@pytest.mark.parametrize("mode", list(POLICY_LOSSES))
def test_without_old_log_probs_equals_passing_the_same_values(mode):
    log_probs, batch = random_batch(old=False)
    same = select(batch, slice(None))
    same.old_log_probs = log_probs.clone()
    results = []
    for inputs in (batch, same):
        leaf = log_probs.clone().requires_grad_()
        loss, sums = PolicyLoss(aggregation=Aggregation(tokens=9), loss_mode=mode)(leaf, inputs)
        loss.backward()
        results.append((loss.item(), leaf.grad, {k: v.item() for k, v in sums.items()}))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
