"""Experts in the place of Megatron's feed-forward layer. Each rank has some of them whole; tokens travel to their experts and back.

Experts are dealt to expert-parallel x tensor-parallel ranks. Expert-parallel ranks have samples of their own and exchange tokens
all-to-all (Lepikhin et al. 2020, arXiv:2006.16668); tensor-parallel ranks have the same tokens, so each sends those of its own experts
and the results are added. Routing is that of Qwen3-MoE: softmax over all experts in float32, the best k, made to sum to 1 if asked.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

with warnings.catch_warnings():  # without Apex and TransformerEngine it says so at length, and works
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer import TransformerConfig

from psrl.trainer.backends.megatron_layout import Dealt, Place


@dataclass(frozen=True, slots=True)
class Routing:
    """`per_token`: experts that see a token; `normalized`: their weights sum to 1."""

    num_experts: int
    per_token: int
    width: int
    normalized: bool


class ExpertLayer(torch.nn.Module):
    """This rank's experts and the router, which every rank has. Uninitialised. The number of tokens may differ between ranks; that of
    calls may not."""

    def __init__(self, config: TransformerConfig, routing: Routing, dealt: Dealt, **_: Any) -> None:
        super().__init__()
        self._routing, self._dealt = routing, dealt
        here, hidden, dtype = routing.num_experts // dealt.size, config.hidden_size, config.params_dtype
        self.router = torch.nn.Parameter(torch.empty(routing.num_experts, hidden, dtype=dtype))
        self.gate_up = torch.nn.Parameter(torch.empty(here, 2 * routing.width, hidden, dtype=dtype))
        self.down = torch.nn.Parameter(torch.empty(here, hidden, routing.width, dtype=dtype))

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[length, rows, hidden] -> the same, and Megatron's place for a bias."""
        group = self._dealt.tensor.group
        tokens = copy_to_tensor_model_parallel_region(hidden, group=group).flatten(0, 1)
        weights, chosen = self._route(tokens)
        out = self._through_experts(tokens, weights.flatten(), chosen.flatten())
        return reduce_from_tensor_model_parallel_region(out, group=group).view_as(hidden), None

    def _route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of each token's experts, [tokens, per_token]. Tensor-parallel ranks take the first one's choice: their
        routers may differ by rounding, and a token's expert must be the same to all of them."""
        probabilities = F.linear(tokens, self.router).softmax(-1, dtype=torch.float32)
        chosen = probabilities.topk(self._routing.per_token, dim=-1).indices
        if self._dealt.tensor.size > 1:
            dist.broadcast(chosen, group=self._dealt.tensor.group, group_src=0)
        weights = probabilities.gather(-1, chosen)
        if self._routing.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(tokens.dtype), chosen

    def _through_experts(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The sum over each token's experts that this tensor-parallel rank answers for, [tokens, hidden]."""
        dealt, here, experts = self._dealt, len(self.gate_up), self._routing.num_experts
        to_expert = chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        sent = to_expert.view(dealt.exchange.size, dealt.tensor.size, here)[:, dealt.tensor.rank].contiguous()
        arrivals = Arrivals(sent, dealt.exchange)
        mine = chosen // here % dealt.tensor.size == dealt.tensor.rank
        order = chosen.where(mine, experts).argsort(stable=True)[: arrivals.num_sent]  # those of other ranks come last
        whose = order // self._routing.per_token
        results = arrivals.send_back(self._experts(arrivals.fetch(tokens[whose]), arrivals.ends))
        return torch.zeros_like(tokens).index_add(0, whose, results * weights[order, None])

    def _experts(self, inputs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """What this rank's experts make of their rows, which `ends` deals to them. One without rows still has a gradient: zero."""
        if not len(inputs):  # no product of groups: their gradients come from one expert's
            return F.linear(F.linear(inputs, self.gate_up[0]).chunk(2, dim=-1)[0], self.down[0])
        gate, up = F.grouped_mm(inputs, self.gate_up.mT, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)


class Arrivals:
    """One exchange: rows sorted by expert at each sender, at the receiver by expert over all senders. `sent`: how many this rank sends
    to each expert of each rank, [ranks, experts of a rank]. Asks the device once for the numbers."""

    def __init__(self, sent: torch.Tensor, ranks: Place) -> None:
        self._ranks = ranks
        received = sent
        if ranks.size > 1:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=ranks.group)
        self._out, self._come = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        self.num_sent = sum(self._out)
        self.ends = received.sum(0).cumsum(0).to(torch.int32)
        """Where the rows of each of this rank's experts end, int32 on the device."""
        number = torch.arange(sent.shape[1], device=sent.device).repeat(len(sent))
        number = number.repeat_interleave(received.flatten(), output_size=sum(self._come))
        self._by_expert = number.argsort(stable=True)
        self._as_arrived = self._by_expert.argsort()

    def fetch(self, rows: torch.Tensor) -> torch.Tensor:
        """Everybody's rows for this rank's experts."""
        return rows if self._ranks.size == 1 else self._exchange(rows, self._out, self._come)[self._by_expert]

    def send_back(self, results: torch.Tensor) -> torch.Tensor:
        """Results in the order of `fetch` -> those of this rank's own rows, in the order in which they were sent."""
        return results if self._ranks.size == 1 else self._exchange(results[self._as_arrived], self._come, self._out)

    def _exchange(self, rows: torch.Tensor, out: list[int], come: list[int]) -> torch.Tensor:
        exchanged: torch.Tensor = _Exchange.apply(rows, out, come, self._ranks.group)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchange(torch.autograd.Function):
    """All-to-all of unequal parts; gradients go the same ways back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, out: list[int], come: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (out, come), group
        received = rows.new_empty(sum(come), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), come, out, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        out, come = ctx.splits
        back = gradient.new_empty(sum(out), *gradient.shape[1:])
        dist.all_to_all_single(back, gradient.contiguous(), out, come, group=ctx.group)
        return back, None, None, None
