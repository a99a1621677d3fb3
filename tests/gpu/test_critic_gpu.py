"""The critic on a GPU: the values, loss curve and checkpoint of the CPU's."""

from __future__ import annotations

import pytest
import torch
from critic_ranks import make_critic, train_step, with_head
from fsdp2_ranks import scores_by_row

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

BFLOAT16 = {"mixed_precision": "bfloat16"}
VARIANTS = {
    "float32": {},
    "recomputed": {"gradient_checkpointing": True},
    "param_offload": {"fsdp_config": {"param_offload": True}},
    "optimizer_offload": {"fsdp_config": {"optimizer_offload": True}},
    "bfloat16": BFLOAT16 | {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_values_curve_and_checkpoint_are_those_of_the_cpu(name, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = name != "bfloat16"
    near = {"rel": 1e-3, "abs": 1e-5} if exact else {"rel": 0.1, "abs": 0.02}
    cpu, gpu = with_head(make_critic()), with_head(make_critic(VARIANTS[name], device="cuda"))
    expected = scores_by_row(cpu, cpu.values, shared=gpu.can_share_prompts)
    got = scores_by_row(gpu, gpu.values)
    assert got.keys() == expected.keys()
    for row, values in expected.items():
        torch.testing.assert_close(got[row], values, rtol=0, atol=1e-4 if exact else 0.05)
    for step in range(2):
        assert train_step(gpu, step, cap=15) == pytest.approx(train_step(cpu, step), **near)
    gpu.save_async(tmp_path / "state").wait()
    again = make_critic(seed=1)  # a checkpoint of the GPU goes on on the CPU
    again.load(tmp_path / "state")
    for step in range(2, 4):
        row = train_step(cpu, step)
        assert train_step(gpu, step, cap=15) == pytest.approx(row, **near)
        assert train_step(again, step) == pytest.approx(row, **near)
