"""The pipeline's schedule against one model, with stages as threads and mailboxes between them, and how parameters are dealt."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psrl.trainer.backends.owners import deal
from psrl.trainer.backends.pipeline_parallel import forward_only, one_forward_one_backward, stage_layers

pytestmark = pytest.mark.unit

DEADLINE_S = 20.0


@dataclass
class Mailboxes:
    """A Link of stage `rank`; `boxes[i, j]` holds what stage i has sent to j."""

    rank: int
    size: int
    boxes: dict[tuple[int, int], queue.Queue]
    shapes: list = field(default_factory=list)

    def exchange(self, *, to_previous=None, to_next=None, from_previous=None, from_next=None):
        for tensor, peer in ((to_previous, self.rank - 1), (to_next, self.rank + 1)):
            if tensor is not None and 0 <= peer < self.size:
                self.boxes[self.rank, peer].put(tensor.detach().clone())
        return tuple(
            self._take(peer, shape) for peer, shape in ((self.rank - 1, from_previous), (self.rank + 1, from_next))
        )

    def _take(self, peer, shape):
        if shape is None or not 0 <= peer < self.size:
            return None
        tensor = self.boxes[peer, self.rank].get(timeout=DEADLINE_S)
        assert tensor.shape == shape
        return tensor


def run_stages(stages: int, inputs: list[torch.Tensor], weights: list[torch.Tensor]):
    """Each stage multiplies by its weight and takes the sine; the loss is the sum. Returns (outputs of a pass without gradient on the
    last stage, most micro-batches that each stage held at once)."""
    boxes = {(i, j): queue.Queue() for i in range(stages) for j in range(stages)}
    shapes = [tuple(x.shape) for x in inputs]
    outputs: list[list[torch.Tensor]] = [[] for _ in range(stages)]
    held, most = [0] * stages, [0] * stages
    failures: list[BaseException] = []

    def stage(rank: int) -> None:
        def run(number: int, received: torch.Tensor | None) -> torch.Tensor:
            assert (received is None) == (rank == 0)
            out = (weights[rank] * (inputs[number] if received is None else received)).sin()
            if torch.is_grad_enabled():
                held[rank] += 1
                most[rank] = max(most[rank], held[rank])
                out.register_hook(lambda _: held.__setitem__(rank, held[rank] - 1))
            return out.sum() if rank == stages - 1 else out

        link = Mailboxes(rank, stages, boxes)
        try:
            with torch.no_grad():
                outputs[rank] = forward_only(link, shapes, run)
            one_forward_one_backward(link, shapes, run)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=stage, args=(rank,)) for rank in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
    assert all(box.empty() for box in boxes.values())
    return outputs[-1], most


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_micro_batch_passes_all_stages_both_ways(stages: int, count: int):
    torch.manual_seed(0)
    inputs = [torch.randn(2 + number, 3) for number in range(count)]
    weights = [torch.randn(3, requires_grad=True) for _ in range(stages)]
    copies = [weight.detach().clone().requires_grad_() for weight in weights]
    losses = []
    for x in inputs:
        for weight in copies:
            x = (weight * x).sin()
        losses.append(x.sum())
    sum(losses, torch.zeros((), requires_grad=True)).backward()
    outputs, most = run_stages(stages, inputs, weights)
    torch.testing.assert_close(outputs, [loss.detach() for loss in losses])
    for weight, copy in zip(weights, copies, strict=True):
        if count:
            torch.testing.assert_close(weight.grad, copy.grad)
    assert most == [min(stages - rank, count) for rank in range(stages)]


@given(st.integers(1, 30), st.integers(1, 8))
def test_stages_have_all_layers_in_order(layers: int, size: int):
    stages = [stage_layers(layers, rank, size) for rank in range(size)]
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert sorted({len(stage.layers) for stage in stages})[-1] - min(len(s.layers) for s in stages) <= 1


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 100), min_size=4), st.integers(1, 4))
def test_every_rank_steps_about_as_much(sizes: dict[str, int], ranks: int):
    owners = deal(sizes, ranks)
    load = [sum(sizes[name] for name, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert owners.keys() == sizes.keys() and min(load) > 0
    assert max(load) - min(load) <= max(sizes.values())
