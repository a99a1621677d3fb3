"""Log-probs and entropies where each rank has the logits of a part of the vocabulary; no rank sees all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from psrl.algorithms.token_entropy import token_entropies
from psrl.algorithms.token_log_probs import chunks, token_log_probs


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """This rank has the logits of the tokens from `start` on; the ranks of `group` have all."""

    start: int
    group: dist.ProcessGroup


def part_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, part: VocabularyPart | None, *, fused: bool = False
) -> torch.Tensor:
    """log_softmax(logits / temperature) at `tokens`: logits [n, part], tokens int64 [n] the same on every rank -> float32 [n],
    the same on every rank. See `token_log_probs`, which does it where `part` is None (and then heeds `fused`)."""
    if part is None:
        return token_log_probs(logits, tokens, temperature, fused=fused)
    result: torch.Tensor = _LogProbs.apply(logits, tokens, _scale(temperature), part)  # type: ignore[no-untyped-call]
    return result


def part_entropies(logits: torch.Tensor, temperature: float, part: VocabularyPart | None) -> torch.Tensor:
    """The entropy of softmax(logits / temperature): logits [n, part] -> float32 [n]. See `token_entropies`."""
    if part is None:
        return token_entropies(logits, temperature)
    result: torch.Tensor = _Entropies.apply(logits, _scale(temperature), part)  # type: ignore[no-untyped-call]
    return result


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, scale: float, part: VocabularyPart
    ) -> torch.Tensor:
        log_normaliser = _log_normaliser(logits, scale, part.group)
        local = tokens - part.start
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        chosen = logits.gather(-1, local[:, None]).squeeze(-1).float() * scale * mine
        dist.all_reduce(chosen, group=part.group)
        ctx.save_for_backward(logits, local, mine, log_normaliser)
        ctx.scale = scale
        return chosen - log_normaliser

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Each rank's part of [j = token] - softmax_j; the output layer's own backward adds the parts up."""
        logits, local, mine, log_normaliser = ctx.saved_tensors
        grad = grad_outputs[0][:, None] * ctx.scale
        grad_logits = torch.empty_like(logits)
        for rows in chunks(logits):
            chunk = (logits[rows].float() * ctx.scale).sub_(log_normaliser[rows, None]).exp_().mul_(-grad[rows])
            grad_logits[rows] = chunk.scatter_add_(-1, local[rows, None], grad[rows] * mine[rows, None]).to(
                logits.dtype
            )
        return grad_logits, None, None, None


class _Entropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, scale: float, part: VocabularyPart) -> torch.Tensor:
        log_normaliser = _log_normaliser(logits, scale, part.group)
        entropies = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for rows in chunks(logits):
            log_p = logits[rows].float() * scale - log_normaliser[rows, None]
            entropies[rows] = -(log_p.exp() * log_p).sum(-1)
        dist.all_reduce(entropies, group=part.group)
        ctx.save_for_backward(logits, log_normaliser, entropies)
        ctx.scale = scale
        return entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """dH / d logit_j = -scale p_j (log p_j + H), for this rank's j."""
        logits, log_normaliser, entropies = ctx.saved_tensors
        grad = grad_outputs[0][:, None] * ctx.scale
        grad_logits = torch.empty_like(logits)
        for rows in chunks(logits):
            log_p = logits[rows].float() * ctx.scale - log_normaliser[rows, None]
            grad_logits[rows] = (-grad[rows] * log_p.exp() * (log_p + entropies[rows, None])).to(logits.dtype)
        return grad_logits, None, None


def _log_normaliser(logits: torch.Tensor, scale: float, group: dist.ProcessGroup) -> torch.Tensor:
    """log sum_j exp(scale x logit_j) over all ranks' parts, float32 [n]."""
    own = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for rows in chunks(logits):
        own[rows] = (logits[rows].float() * scale).logsumexp(-1)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return torch.stack(gathered).logsumexp(0)


def _scale(temperature: float) -> float:
    return 1.0 / temperature if temperature > 0 else 1.0
