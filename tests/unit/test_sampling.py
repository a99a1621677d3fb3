"""Sampling against independent reference distributions. Seeds are fixed: a chi-square here passes or fails for ever."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from psrl.protocol.generation import SamplingParams
from psrl.rollout.engines import sampling
from psrl.rollout.engines.sampling import draw, filter_top, sample, uniforms

pytestmark = pytest.mark.unit

DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0])


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The filtered distribution, token by token in plain Python."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    """Pearson's statistic over the tokens that may occur; infinite if an impossible one did."""
    if any(c and not p for c, p in zip(counts, probabilities, strict=True)):
        return math.inf
    n = sum(counts)
    return sum((c - n * p) ** 2 / (n * p) for c, p in zip(counts, probabilities, strict=True) if p)


# 24.3 is the 99.9 % quantile of chi-square with 7 degrees of freedom, the most that 8 tokens can have.
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, -1, 1.0),
        (0.5, -1, 1.0),
        (1.7, 0, 1.0),
        (1.0, 3, 1.0),
        (1.0, 100, 1.0),
        (1.0, 1, 1.0),
        (1.0, -1, 0.6),
        (1.0, -1, 0.95),
        (0.8, 5, 0.7),
        (1.3, 4, 0.999),
        (1.0, -1, 1e-9),
    ],
)
def test_draws_follow_the_reference_distribution(temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs = sample(LOGITS.expand(DRAWS, -1), [params] * DRAWS, range(DRAWS), [0] * DRAWS)
    counts = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    assert chi_square(counts, reference(LOGITS.tolist(), temperature, top_k, top_p)) < 24.3
    full = torch.log_softmax(LOGITS / temperature, -1)
    torch.testing.assert_close(logprobs, full[tokens], rtol=0, atol=1e-6)


def test_one_seed_over_many_positions_follows_the_distribution_too() -> None:
    params = SamplingParams()
    tokens, _ = sample(LOGITS.expand(DRAWS, -1), [params] * DRAWS, [7] * DRAWS, range(DRAWS))
    counts = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    assert chi_square(counts, reference(LOGITS.tolist(), 1.0, -1, 1.0)) < 24.3


def test_mixed_rows_get_what_they_would_get_alone() -> None:
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=2),
        SamplingParams(temperature=1.5, top_p=0.5),
        SamplingParams(temperature=0.0, top_k=2),
        SamplingParams(temperature=0.9, top_k=4, top_p=0.8),
    ]
    params = kinds * 20
    torch.manual_seed(0)
    logits = 2 * torch.randn(len(params), 50)
    seeds, positions = list(range(1000, 1000 + len(params))), [i % 13 for i in range(len(params))]
    tokens, logprobs = sample(logits, params, seeds, positions)
    alone = [sample(logits[i : i + 1], params[i : i + 1], [seeds[i]], [positions[i]]) for i in range(len(params))]
    assert tokens.tolist() == [int(t) for t, _ in alone]
    torch.testing.assert_close(logprobs, torch.cat([lp for _, lp in alone]), rtol=0, atol=1e-6)


def test_greedy_takes_the_argmax_and_reports_the_unscaled_log_prob() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 30)
    tokens, logprobs = sample(logits, [SamplingParams(temperature=0.0)] * 5, [0] * 5, [0] * 5)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).max(-1).values)


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits = torch.tensor([[3.0, 1.0, -2.0]], dtype=torch.bfloat16)
    _, logprobs = sample(logits, [SamplingParams(temperature=0.0)], [0], [0])
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.log_softmax(logits.float(), -1)[:, 0])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, 4),
        (2, 1.0, 2),
        (9, 1.0, 4),
        (0, 0.5, 1),
        (0, 0.51, 2),
        (0, 0.8, 3),
        (2, 0.7, 2),
        (2, 0.6, 1),
        (0, 0.0, 1),
    ],
)
def test_filter_boundaries(top_k: int, top_p: float, kept: int) -> None:
    # Top-2 alone holds 0.75 of the mass, so its first token has 2/3 of the renormalised one.
    probs = torch.tensor([[0.125, 0.5, 0.125, 0.25]])
    weights, ids = filter_top(probs, torch.tensor([top_k]), torch.tensor([top_p]))
    assert int((weights > 0).sum()) == kept
    assert ids[0, 0] == 1
    assert weights.dtype == probs.dtype


def test_a_column_without_weight_is_never_drawn() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(4, -1)
    smallest, largest = 2.0**-49, 1 - 2.0**-49
    assert draw(weights, torch.tensor([smallest, 0.2999, 0.3001, largest], dtype=torch.float64)).tolist() == [
        1,
        1,
        3,
        3,
    ]


def test_large_vocabularies_are_drawn_in_slices_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    weights, u = torch.rand(9, 40), torch.rand(9, dtype=torch.float64)
    at_once = draw(weights, u)
    monkeypatch.setattr(sampling, "_DRAW_ELEMENTS", 80)
    assert draw(weights, u).tolist() == at_once.tolist()


def test_uniforms_depend_on_seed_and_position_only_and_are_uniform() -> None:
    assert uniforms([5, 6], [3, 3])[0] == uniforms([9, 5], [0, 3])[1]
    assert uniforms([-1], [0]) == uniforms([2**64 - 1], [0])
    grid = uniforms(np.repeat(np.arange(100), 100).tolist(), np.tile(np.arange(100), 100).tolist())
    assert len(set(grid.tolist())) == 10_000
    assert grid.min() > 0 and grid.max() < 1
    counts, _ = np.histogram(grid, bins=8, range=(0, 1))
    assert chi_square(counts.tolist(), [1 / 8] * 8) < 24.3
    # Neighbouring seeds and neighbouring positions are not correlated: 4 / sqrt(n) is four standard deviations.
    square = grid.reshape(100, 100) - 0.5
    for a, b in ((square[1:], square[:-1]), (square[:, 1:], square[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / math.sqrt(a.size)
