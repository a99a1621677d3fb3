"""Entropies of the token distributions from logits, without a float32 copy of the logits."""

from __future__ import annotations

from typing import Any

import torch

from psrl.algorithms.token_log_probs import chunks


def token_entropies(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """-sum_j p_j log p_j of p = softmax(logits / temperature): logits [n, vocabulary] -> float32 [n]. Temperature 0 counts as
    1, as in `token_log_probs`; n may be 0."""
    scale = 1.0 / temperature if temperature > 0 else 1.0
    result: torch.Tensor = _TokenEntropies.apply(logits, scale)  # type: ignore[no-untyped-call]
    return result


class _TokenEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, scale: float) -> torch.Tensor:
        entropies = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for rows in chunks(logits):
            log_p = torch.log_softmax(logits[rows].float() * scale, -1)
            entropies[rows] = -_p_log_p(log_p).sum(-1)
        ctx.save_for_backward(logits, entropies)
        ctx.scale = scale
        return entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """dH / d logit_j = -scale p_j (log p_j + H)."""
        logits, entropies = ctx.saved_tensors
        grad = grad_outputs[0][:, None] * ctx.scale
        grad_logits = torch.empty_like(logits)
        for rows in chunks(logits):
            log_p = torch.log_softmax(logits[rows].float() * ctx.scale, -1)
            grad_logits[rows] = (-grad[rows] * (_p_log_p(log_p) + log_p.exp() * entropies[rows, None])).to(logits.dtype)
        return grad_logits, None


def _p_log_p(log_p: torch.Tensor) -> torch.Tensor:
    """0 where p is 0, also for a logit of -inf."""
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p)
