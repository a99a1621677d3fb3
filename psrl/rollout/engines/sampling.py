"""From logits to tokens and log-probs, for a whole batch at once.

Every draw is a pure function of (seed, position, logits): one uniform number per row comes from a counter-based hash
and is pushed through the inverse of the row's cumulative distribution. Who else is in the batch does not matter, so a
sample that was preempted, interrupted or moved to another instance goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from psrl.protocol.generation import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UINT64 = (1 << 64) - 1
_DRAW_ELEMENTS = 1 << 19
"""Cumulative sums are built for this many probabilities at a time: 4 MiB of float64 stay in the processor's cache."""


def _splitmix64(state: np.ndarray) -> np.ndarray:
    """One output of the splitmix64 generator for each state (Steele, Lea and Flood, "Fast splittable PRNGs", 2014)."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in the open interval (0, 1) per row, float64 [n], a function of (seed, position) alone.

    48 random bits centred in their cell: the largest value times a float64 total stays below that total.
    """
    state = _splitmix64(np.array([seed & _UINT64 for seed in seeds], dtype=np.uint64))
    bits = _splitmix64(state ^ np.array(positions, dtype=np.uint64)) >> np.uint64(16)
    return (bits.astype(np.float64) + 0.5) * 2.0**-48


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Column drawn from each row of non-negative `weights` [n, k], which need not sum to 1, by inverse CDF.

    `u` is float64 [n] in (0, 1). A column of weight 0 is never drawn. Returns int64 [n].
    """
    rows_at_once = max(1, _DRAW_ELEMENTS // weights.shape[1])
    columns = [
        _draw_rows(weights[start : start + rows_at_once], u[start : start + rows_at_once])
        for start in range(0, weights.shape[0], rows_at_once)
    ]
    return columns[0] if len(columns) == 1 else torch.cat(columns)


def _draw_rows(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    cdf = weights.cumsum(-1, dtype=torch.float64)
    target = u.unsqueeze(1) * cdf[:, -1:]
    # A row of NaN would point one past the end; the caller refuses such logits, the index must only stay legal.
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def filter_top(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in descending order with those outside top-k and then top-p set to 0, and their token ids.

    `probs` [n, vocab], `top_k` int64 [n] (<= 0: off), `top_p` float [n] (>= 1: off; the mass is that of the
    renormalised top-k distribution, and the token that crosses `top_p` is kept). The most probable token always stays.
    Both results have shape [n, k] with k = vocab, or the largest top_k when every row has one.
    """
    vocab = probs.shape[1]
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    kept, ids = torch.topk(probs, int(k.max()), dim=-1)
    rank = torch.arange(kept.shape[1], device=probs.device)
    kept = kept.masked_fill(rank >= k.unsqueeze(1), 0.0)
    mass = kept.cumsum(-1, dtype=torch.float64)
    before = mass - kept
    limit = torch.where(top_p < 1, top_p.double(), 2.0).unsqueeze(1) * mass[:, -1:]
    return kept.masked_fill((before >= limit) & (rank > 0), 0.0), ids


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row.

    `logits` [n, vocab]; row i uses `params[i]` and the draw (seeds[i], positions[i]). Returns token ids, int64 [n], and
    float32 [n] log_softmax(logits / temperature) at them, over the full vocabulary (temperature 0: greedy, no scaling).
    """
    logits = logits.float()
    first = params[0]
    if all(p is first for p in params):
        return _sample_uniform_batch(logits, first, seeds, positions)
    temperature = torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)
    logprobs = torch.log_softmax(logits / temperature.unsqueeze(1), dim=-1)
    u = torch.from_numpy(uniforms(seeds, positions)).to(logits.device)
    probs = logprobs.exp()
    tokens = draw(probs, u)
    filtered = [i for i, p in enumerate(params) if p.temperature > 0 and _has_filter(p)]
    if filtered:
        tokens[filtered] = _draw_filtered(probs[filtered], [params[i] for i in filtered], u[filtered])
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    if greedy:
        tokens[greedy] = logits[greedy].argmax(-1)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _sample_uniform_batch(
    logits: torch.Tensor, params: SamplingParams, seeds: Sequence[int], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual case: every row has the same parameters."""
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    if params.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        u = torch.from_numpy(uniforms(seeds, positions)).to(logits.device)
        probs = logprobs.exp()
        tokens = _draw_filtered(probs, [params] * len(probs), u) if _has_filter(params) else draw(probs, u)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _draw_filtered(probs: torch.Tensor, params: Sequence[SamplingParams], u: torch.Tensor) -> torch.Tensor:
    top_k = torch.tensor([p.top_k for p in params], device=probs.device)
    top_p = torch.tensor([p.top_p for p in params], device=probs.device, dtype=torch.float64)
    kept, ids = filter_top(probs, top_k, top_p)
    return ids.gather(1, draw(kept, u).unsqueeze(1)).squeeze(1)
