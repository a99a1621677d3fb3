"""Pipeline parallelism: the layers are dealt to stages, and micro-batches go through them one behind the other.

The schedule is one-forward-one-backward (Narayanan et al. 2021, arXiv:2104.04473, figure 4): a stage holds the activations of at
most as many micro-batches as there are stages behind it, itself included. It runs over gloo and NCCL alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Shape = tuple[int, ...]
Run = Callable[[int, torch.Tensor | None], torch.Tensor]
"""`run(i, received)`: forward pass of micro-batch i from what the stage before gave (None at the first one) to what the next one
gets, or to the loss (at the last one)."""


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Stage `rank` of `size` and its layers, counted over the whole model."""

    rank: int
    size: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


def stage_layers(num_layers: int, rank: int, size: int) -> StageLayers:
    """Equally many layers a stage; where they do not divide the last ones have one less, since the output layer is there too.

    >>> [stage_layers(7, rank, 3).layers for rank in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    each, more = divmod(num_layers, size)
    start = rank * each + min(rank, more)
    return StageLayers(rank, size, range(start, start + each + (rank < more)))


class Link:
    """A stage's connection with the stages before and behind it: the ranks of `group`, in order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        self.group, self._device, self._dtype = group, device, dtype
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL wants all of them in its first call

    def exchange(
        self,
        *,
        to_previous: torch.Tensor | None = None,
        to_next: torch.Tensor | None = None,
        from_previous: Shape | None = None,
        from_next: Shape | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send tensors and receive some of these shapes, all at once, so that two stages that send to each other do not wait
        for each other. Returns what came from (the stage before, the next one). Where there is no such stage, nothing moves."""
        before, behind = self.rank > 0, self.rank < self.size - 1
        received_before = self._empty(from_previous) if before else None
        received_behind = self._empty(from_next) if behind else None
        moves = [
            (dist.isend, to_previous if before else None, self.rank - 1),
            (dist.irecv, received_before, self.rank - 1),
            (dist.isend, to_next if behind else None, self.rank + 1),
            (dist.irecv, received_behind, self.rank + 1),
        ]
        operations = [
            dist.P2POp(move, tensor.contiguous(), group=self.group, group_peer=peer)
            for move, tensor, peer in moves
            if tensor is not None
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received_before, received_behind

    def from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """The last stage's tensor, of the same shape and dtype everywhere, in place."""
        dist.broadcast(tensor, group_src=self.size - 1, group=self.group)
        return tensor

    def metrics_from_last(self, metrics: dict[str, float]) -> dict[str, float]:
        """Those of the last stage, on every stage."""
        box = [metrics]
        dist.broadcast_object_list(box, group_src=self.size - 1, group=self.group)
        return box[0]

    def _empty(self, shape: Shape | None) -> torch.Tensor | None:
        return None if shape is None else torch.empty(shape, device=self._device, dtype=self._dtype)


def forward_only(link: Link, shapes: Sequence[Shape], run: Run) -> list[torch.Tensor]:
    """Forward passes of micro-batches whose hidden states have these shapes; what `run` gave for each."""
    outputs = []
    for number, shape in enumerate(shapes):
        received, _ = link.exchange(from_previous=shape)
        outputs.append(run(number, received))
        link.exchange(to_next=outputs[-1])
    return outputs


def one_forward_one_backward(link: Link, shapes: Sequence[Shape], run: Run) -> None:
    """Forward and backward passes of all micro-batches; gradients are added to those of the stage's parameters."""
    count = len(shapes)
    ahead = min(link.size - 1 - link.rank, count)
    """Micro-batches whose forward pass is done before the first backward pass."""
    held: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()

    def forward(number: int, received: torch.Tensor | None) -> torch.Tensor:
        if received is not None:
            received.requires_grad_()
        output = run(number, received)
        held.append((received, output))
        return output.detach()

    def backward(gradient: torch.Tensor | None) -> torch.Tensor | None:
        received, output = held.popleft()
        torch.autograd.backward(output, gradient)
        return None if received is None else received.grad

    received, _ = link.exchange(from_previous=shapes[0]) if count else (None, None)
    for number in range(ahead):
        output = forward(number, received)
        link.exchange(to_next=output)
        received, _ = link.exchange(from_previous=shapes[number + 1]) if number + 1 < count else (None, None)
    for number in range(ahead, count):
        output = forward(number, received)
        _, gradient = link.exchange(to_next=output, from_next=shapes[number - ahead])
        more = number + 1 < count
        received, _ = link.exchange(to_previous=backward(gradient), from_previous=shapes[number + 1] if more else None)
    for number in range(count - ahead, count):
        _, gradient = link.exchange(from_next=shapes[number])
        link.exchange(to_previous=backward(gradient))
