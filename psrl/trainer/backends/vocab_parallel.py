"""Log-probs of given tokens where each rank has the logits of a part of the vocabulary; no rank sees all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from psrl.algorithms.token_log_probs import chunks


def vocab_parallel_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, start: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """log_softmax(logits / temperature) at `tokens`: logits [n, part] of the tokens from `start` on, tokens int64 [n] the
    same on every rank of `group` -> float32 [n], the same on every rank. See `token_log_probs`."""
    scale = 1.0 / temperature if temperature > 0 else 1.0
    result: torch.Tensor = _VocabParallel.apply(logits, tokens, scale, start, group)  # type: ignore[no-untyped-call]
    return result


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, scale: float, start: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        parts = torch.empty(len(tokens), dtype=torch.float32, device=logits.device)
        for rows in chunks(logits):
            parts[rows] = (logits[rows].float() * scale).logsumexp(-1)
        gathered = [torch.empty_like(parts) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, parts, group=group)
        log_normaliser = torch.stack(gathered).logsumexp(0)
        local = tokens - start
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        chosen = logits.gather(-1, local[:, None]).squeeze(-1).float() * scale * mine
        dist.all_reduce(chosen, group=group)
        ctx.save_for_backward(logits, local, mine, log_normaliser)
        ctx.scale = scale
        return chosen - log_normaliser

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """Each rank's part of [j = token] - softmax_j; what follows adds the parts up."""
        logits, local, mine, log_normaliser = ctx.saved_tensors
        grad = grad_outputs[0][:, None] * ctx.scale
        grad_logits = torch.empty_like(logits)
        for rows in chunks(logits):
            chunk = (logits[rows].float() * ctx.scale).sub_(log_normaliser[rows, None]).exp_().mul_(-grad[rows])
            grad_logits[rows] = chunk.scatter_add_(-1, local[rows, None], grad[rows] * mine[rows, None])
        return grad_logits, None, None, None, None
