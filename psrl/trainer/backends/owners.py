"""Who steps a parameter: gradients go to its owner, weights come back from there.

With a distributed optimizer (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054) each of the ranks that hold the same part of
the model steps some of its parameters: it alone has their moments, and their weights in the optimizer's dtype. Whole
parameters are dealt out instead of equal slices of all of them, so that a moment keeps the shape that checkpoints know. An
embedding that two pipeline stages share is stepped by the first stage alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


def deal(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Owner of each parameter: the largest first, each to the rank that has least so far.

    >>> deal({"a": 1, "b": 5, "c": 3, "d": 1}, 2)
    {'b': 0, 'c': 1, 'a': 1, 'd': 1}
    """
    load = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = load.index(min(load))
        load[owners[name]] += sizes[name]
    return owners


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold the same part of the model. `owners`: as `deal` has it; None: every rank steps all of it."""

    group: dist.ProcessGroup
    rank: int
    size: int
    owners: Mapping[str, int] | None

    def owns(self, name: str) -> bool:
        """Whether this rank steps it."""
        return self.owners is None or self.owners[name] == self.rank

    def add_gradients(self, name: str, gradient: torch.Tensor) -> None:
        """Add those of all ranks, in place, for the ranks that step it."""
        if self.size == 1:
            return
        if self.owners is None:
            dist.all_reduce(gradient, group=self.group)
        else:
            dist.reduce(gradient, group_dst=self.owners[name], group=self.group)

    def spread_weight(self, name: str, weight: torch.Tensor) -> None:
        """The owner's weight on every rank, in place."""
        if self.size > 1 and self.owners is not None:
            dist.broadcast(weight, group_src=self.owners[name], group=self.group)


@dataclass(frozen=True, slots=True)
class Tied:
    """The embedding `name` of the first stage, or on the last one its copy; `group` has both stages."""

    group: dist.ProcessGroup
    name: str
    is_copy: bool


@dataclass(frozen=True, slots=True)
class Owners:
    """All together, for the parameters of one stage. `expert_replicas`: the ranks that hold the same experts, whose parameters are
    `experts`; all others are held by all `replicas`."""

    replicas: Replicas
    tied: Tied | None = None
    expert_replicas: Replicas | None = None
    experts: frozenset[str] = frozenset()

    def replicas_of(self, name: str) -> Replicas:
        """Those that hold it."""
        if name not in self.experts:
            return self.replicas
        assert self.expert_replicas is not None
        return self.expert_replicas

    def owns(self, name: str) -> bool:
        """Whether this rank steps it."""
        return not self._is_copy(name) and self.replicas_of(name).owns(name)

    def add_gradients(self, name: str, gradient: torch.Tensor) -> None:
        """Add those of all ranks that hold it, in place, where it is stepped. Collective."""
        if self.tied is not None and self.tied.name == name:
            dist.reduce(gradient, group_dst=0, group=self.tied.group)
        if not self._is_copy(name):
            self.replicas_of(name).add_gradients(name, gradient)

    def spread_weight(self, name: str, weight: torch.Tensor) -> None:
        """The owner's weight on all ranks that hold it, in place. Collective."""
        if not self._is_copy(name):
            self.replicas_of(name).spread_weight(name, weight)
        if self.tied is not None and self.tied.name == name:
            dist.broadcast(weight, group_src=0, group=self.tied.group)

    def _is_copy(self, name: str) -> bool:
        return self.tied is not None and self.tied.is_copy and self.tied.name == name
