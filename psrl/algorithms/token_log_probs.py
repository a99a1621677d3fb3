"""Log-probs of given tokens from logits, without a float32 copy of the logits.

With a vocabulary of 150,000 the logits are by far the largest tensor of a step. Only they themselves and their gradient
are held here, both in the dtype that the model computes in; everything float32 exists for one chunk of rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 25
"""Logits of one float32 chunk (128 MiB)."""


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log_softmax(logits / temperature) at `tokens`: logits [n, vocabulary], tokens int64 [n] -> float32 [n].

    Temperature 0 means greedy sampling, whose log-probs are those of temperature 1. n may be 0.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    result: torch.Tensor = _TokenLogProbs.apply(logits, tokens, scale)  # type: ignore[no-untyped-call]
    return result


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        log_normaliser = torch.empty(len(tokens), dtype=torch.float32, device=logits.device)
        for rows in chunks(logits):
            log_normaliser[rows] = (logits[rows].float() * scale).logsumexp(-1)
        ctx.save_for_backward(logits, tokens, log_normaliser)
        ctx.scale = scale
        return logits.gather(-1, tokens[:, None]).squeeze(-1).float() * scale - log_normaliser

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """d log p(token) / d logit_j = scale * ([j = token] - softmax_j)."""
        logits, tokens, log_normaliser = ctx.saved_tensors
        grad = grad_outputs[0][:, None] * ctx.scale
        grad_logits = torch.empty_like(logits)
        for rows in chunks(logits):
            chunk = (logits[rows].float() * ctx.scale).sub_(log_normaliser[rows, None]).exp_().mul_(-grad[rows])
            grad_logits[rows] = chunk.scatter_add_(-1, tokens[rows, None], grad[rows])
        return grad_logits, None, None


def chunks(logits: torch.Tensor) -> list[slice]:
    """Slices of the rows of `logits`, each at most CHUNK_ELEMENTS large (but at least a row)."""
    size = max(CHUNK_ELEMENTS // logits.shape[-1], 1)
    return [slice(start, start + size) for start in range(0, len(logits), size)]
