"""What leaves a Megatron rank and comes back to it: published rows and checkpoints, under Hugging Face names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from psrl.trainer.backends.base import WeightShard
from psrl.trainer.backends.core import row_range
from psrl.trainer.backends.hf_mapping import Kind, Rule, Sizes, join_local, split_local
from psrl.trainer.backends.megatron_layout import Layout
from psrl.trainer.backends.owners import Owners


class OutsideWeights:
    """`shapes`: of all tensors of the model, by Hugging Face name. `rules`: of this rank's parameters, by their name. What they
    are called with are tensors by parameter name, only of those that this rank steps: others answer for the rest."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        rules: Mapping[str, Rule],
        shape: Sizes,
        layout: Layout,
        owners: Owners,
    ) -> None:
        self.shapes, self._rules, self._shape, self._owners = shapes, rules, shape, owners
        self._tensor, self._dealt, self._mesh = layout.tensor, layout.dealt, layout.mesh

    def shards(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[WeightShard]:
        """This rank's rows of every tensor of the model, none of many. Collective. What several ranks step alike is published once,
        each a part of the rows; columns are exchanged for rows between tensor-parallel ranks, not gathered."""
        own = {}
        for name, parameter in parameters.items():
            rule = self._rules[name]
            for hf, part in zip(rule.hugging_face, self._split(rule, parameter.detach()), strict=True):
                start, rows, holders, holder = self._rows(name, rule, part)
                first, end = row_range(len(rows), holder, holders)
                own[hf] = WeightShard(
                    name=hf, full_shape=self.shapes[hf], row_start=start + first, local=rows[first:end]
                )
        some = next(iter(parameters.values()))
        for hf, shape in self.shapes.items():
            nothing = some.new_empty(0, *shape[1:])
            yield own.get(hf) or WeightShard(name=hf, full_shape=shape, row_start=0, local=nothing)

    def _rows(self, name: str, rule: Rule, part: torch.Tensor) -> tuple[int, torch.Tensor, int, int]:
        """(first row, rows, ranks that have and step them, place among these)."""
        held = self._owners.replicas_of(name)
        replica, replicas = (0, 1) if held.owners is not None else (held.rank, held.size)
        if rule.kind is Kind.EXPERTS:
            return self._dealt.rank * len(part), part, replicas, replica
        if rule.dim is None:
            return 0, part, replicas * self._tensor.size, replica * self._tensor.size + self._tensor.rank
        if rule.dim == 1:
            part = self._columns_to_rows(part)
        most = -(-self._shape.vocab_size // self._tensor.size) if rule.kind is Kind.VOCABULARY else len(part)
        return self._tensor.rank * most, part, replicas, replica

    def _columns_to_rows(self, part: torch.Tensor) -> torch.Tensor:
        """[rows, columns / n] of each of n ranks -> [rows / n, columns]."""
        if self._tensor.size == 1:
            return part
        received = torch.empty_like(part, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, part.contiguous(), group=self._tensor.group)
        return received.view(self._tensor.size, -1, part.shape[1]).transpose(0, 1).flatten(1)

    def tensors(self, kind: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`kind.<Hugging Face name>` -> this rank's part, a DTensor where there are several ranks."""
        return {
            f"{kind}.{hf}": self._distributed(name, rule, hf, part)
            for name, value in values.items()
            for rule in (self._rules[name],)
            for hf, part in zip(rule.hugging_face, self._split(rule, value.detach()), strict=True)
        }

    def restore(self, kind: str, state: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `tensors`, into `values`, in place."""
        for name, value in values.items():
            rule = self._rules[name]
            parts = [state[f"{kind}.{hf}"] for hf in rule.hugging_face]
            local = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
            value.copy_(join_local(rule, local, self._shape, self._tensor.size))

    def is_whole(self, name: str) -> bool:
        """Whether every tensor-parallel rank has all of this parameter."""
        return self._rules[name].dim is None

    def num_parameters(self) -> int:
        """Of the whole model, tied ones once."""
        return sum(map(prod, self.shapes.values()))

    def _split(self, rule: Rule, local: torch.Tensor) -> list[torch.Tensor]:
        return split_local(rule, local, self._shape, self._tensor.rank, self._tensor.size)

    def _distributed(self, name: str, rule: Rule, hf: str, part: torch.Tensor) -> torch.Tensor:
        """Over the ranks that step the same: those that hold other parts, and their replicas if all of these step it."""
        if self._mesh is None:
            return part
        full = torch.Size(self.shapes[hf])
        stride = torch.empty(full, device="meta").stride()
        cut = Replicate() if rule.dim is None else Shard(rule.dim)
        placements = {"expert_replicas": Replicate(), "experts": Replicate(), "tensor": cut}
        if rule.kind is Kind.EXPERTS:
            placements["experts"] = cut
        if self._owners.replicas_of(name).owners is not None:
            del placements["expert_replicas"]
            if rule.kind is not Kind.EXPERTS:
                del placements["experts"]
        mesh = self._mesh[tuple(placements)]
        return DTensor.from_local(
            part.contiguous(), mesh, tuple(placements.values()), run_check=False, shape=full, stride=stride
        )
