"""Log-probs of given tokens from logits, without a float32 copy of the logits.

With a vocabulary of 150,000 the logits are by far the largest tensor of a step. Only they themselves and their gradient
are held here, both in the dtype that the model computes in. Everything float32 exists for one chunk of rows at a time or,
where the two functions below are compiled (`fused`), in registers only: then the logits are read once forward, and read
and written once backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 25
"""Logits of one float32 chunk (128 MiB)."""


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0, *, fused: bool = False
) -> torch.Tensor:
    """log_softmax(logits / temperature) at `tokens`: logits [n, vocabulary], tokens int64 [n] -> float32 [n].

    Temperature 0 means greedy sampling, whose log-probs are those of temperature 1. n may be 0. `fused`: by kernels that
    are compiled at the first call (torch.compile, for a GPU).
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    result: torch.Tensor = _TokenLogProbs.apply(logits, tokens, scale, fused)  # type: ignore[no-untyped-call]
    return result


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, scale: float, fused: bool) -> torch.Tensor:
        if fused:
            log_normaliser = _compiled(log_normaliser_of)(logits, scale)
        else:
            log_normaliser = torch.empty(len(tokens), dtype=torch.float32, device=logits.device)
            for rows in chunks(logits):
                log_normaliser[rows] = log_normaliser_of(logits[rows], scale)
        ctx.save_for_backward(logits, tokens, log_normaliser)
        ctx.scale, ctx.fused = scale, fused
        return logits.gather(-1, tokens[:, None]).squeeze(-1).float() * scale - log_normaliser

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, tokens, log_normaliser = ctx.saved_tensors
        grad = grad_outputs[0] * ctx.scale
        if ctx.fused:
            return _compiled(grad_logits_of)(logits, tokens, log_normaliser, grad, ctx.scale), None, None, None
        grad_logits = torch.empty_like(logits)
        for rows in chunks(logits):  # grad_logits_of, in place
            chunk = (logits[rows].float() * ctx.scale).sub_(log_normaliser[rows, None]).exp_().mul_(-grad[rows, None])
            grad_logits[rows] = chunk.scatter_add_(-1, tokens[rows, None], grad[rows, None]).to(logits.dtype)
        return grad_logits, None, None, None


def log_normaliser_of(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """log sum_j exp(scale x logit_j), float32 [n]."""
    return (logits.float() * scale).logsumexp(-1)


def grad_logits_of(
    logits: torch.Tensor, tokens: torch.Tensor, log_normaliser: torch.Tensor, grad: torch.Tensor, scale: float
) -> torch.Tensor:
    """grad x ([j = token] - softmax_j) in the dtype of the logits [n, vocabulary]; grad [n] has the factor `scale` already."""
    softmax = (logits.float() * scale - log_normaliser[:, None]).exp()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    chosen = columns == tokens[:, None]
    return (grad[:, None] * (chosen.float() - softmax)).to(logits.dtype)


@cache
def _compiled(function: Any) -> Any:
    """For any number of rows without compiling anew."""
    return torch.compile(function, dynamic=True)


def chunks(logits: torch.Tensor) -> list[slice]:
    """Slices of the rows of `logits`, each at most CHUNK_ELEMENTS large (but at least a row)."""
    size = max(CHUNK_ELEMENTS // logits.shape[-1], 1)
    return [slice(start, start + size) for start in range(0, len(logits), size)]
