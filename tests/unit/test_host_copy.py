"""The copy that a checkpoint is written from."""

from __future__ import annotations

import pytest
import torch

from psrl.trainer.backends.host_copy import StateCopy

pytestmark = pytest.mark.unit


def test_the_second_copy_lies_where_the_first_lay() -> None:
    state = {"weights": torch.arange(6.0).view(2, 3), "steps": torch.tensor(1)}
    host = StateCopy()
    first = host.of(state)
    addresses = {name: tensor.data_ptr() for name, tensor in first.items()}
    state["weights"].add_(10)
    assert first["weights"].tolist() == [[0, 1, 2], [3, 4, 5]], "a copy does not change with what it was made of"
    second = host.of({"weights": state["weights"].t().contiguous().t(), "steps": torch.tensor(2)})
    assert second["weights"].tolist() == [[10, 11, 12], [13, 14, 15]] and second["steps"].item() == 2
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == addresses


@pytest.mark.parametrize(
    "changed",
    [{"weights": torch.zeros(3, 3)}, {"weights": torch.zeros(2, 3, dtype=torch.int64)}, {"others": torch.zeros(2, 3)}],
    ids=["shape", "dtype", "names"],
)
def test_another_layout_gets_memory_of_its_own(changed: dict[str, torch.Tensor]) -> None:
    host = StateCopy()
    host.of({"weights": torch.ones(2, 3)})
    copy = host.of(changed)
    assert copy.keys() == changed.keys()
    for name, tensor in changed.items():
        assert torch.equal(copy[name], tensor) and copy[name].dtype == tensor.dtype
