"""What a trainer rank says of its device."""

from __future__ import annotations

import pytest
import torch

from psrl.trainer.device import warn_of_float32


@pytest.mark.parametrize(
    ("device", "precision", "warnings"), [("cuda", "float32", 1), ("cuda", "bfloat16", 0), ("cpu", "float32", 0)]
)
def test_float32_on_a_gpu_does_not_go_unsaid(device, precision, warnings, caplog):
    warn_of_float32(torch.device(device), precision)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings and all("mixed_precision=float32" in text for text in said)
