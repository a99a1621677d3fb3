"""The backends on a GPU: the log-probs and loss curve of the CPU, and what offloading to host memory saves."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from backend_launch import launch
from fsdp2_ranks import log_probs_by_row, make_actor, make_model, settings, token_tis, train_step
from test_backends import VARIANTS as ALL
from test_backends import Variant
from transformers import AutoModelForCausalLM, Qwen3Config

from psrl.algorithms.sequences import Sequences
from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.backends.core import BackendCore
from psrl.trainer.backends.make import make_backend
from psrl.trainer.backends.unpadded import IN_ONE_KERNEL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

MEGATRON = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
VARIANTS = [
    pytest.param({}, id="fsdp2"),
    pytest.param({"use_torch_compile": True}, id="compiled"),
    pytest.param({"fsdp_config": {"param_offload": True}}, id="param_offload"),
    pytest.param({"fsdp_config": {"optimizer_offload": True}}, id="optimizer_offload"),
    pytest.param({"use_remove_padding": True}, id="unpadded"),
    pytest.param({"use_remove_padding": True, "use_torch_compile": True}, id="unpadded, compiled"),
    pytest.param({"strategy": "megatron"}, marks=MEGATRON, id="megatron"),
    pytest.param({"strategy": "megatron", "use_remove_padding": True}, marks=MEGATRON, id="megatron, unpadded"),
    pytest.param({"experts": 4}, id="fsdp2, experts"),
    pytest.param({"experts": 4, "use_torch_compile": True}, id="compiled, experts"),
    pytest.param({"experts": 4, "strategy": "megatron"}, marks=MEGATRON, id="megatron, experts"),
]
SPREAD = [variant for variant in ALL if variant.values[0].world_size == 2]
STEPS = 4
AT_ONCE = 3
"""Variants that run on the same two GPUs at a time: most of what one takes is its start."""


@pytest.fixture(autouse=True)
def exact_and_alone():
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


def on(device: str, seed: int = 0, experts: int = 0, **actor) -> BackendCore:
    model = make_model(seed=seed, experts=experts)
    return make_backend(model, make_actor(**settings({"actor": actor})), temperature=0.8, device=device)


@pytest.mark.parametrize("actor", VARIANTS)
def test_log_probs_curve_and_checkpoint_are_those_of_the_cpu(actor, tmp_path):
    cpu, gpu = on("cpu", experts=actor.get("experts", 0)), on("cuda", **actor)
    expected, got = log_probs_by_row(cpu, shared=gpu.can_share_prompts), log_probs_by_row(gpu)
    assert got.keys() == expected.keys()
    for row, values in expected.items():
        torch.testing.assert_close(got[row], values, rtol=0, atol=1e-4)
    for step in range(2):
        assert train_step(gpu, step) == pytest.approx(train_step(cpu, step), rel=5e-4, abs=1e-5)
        gpu.save_async(tmp_path / str(step)).wait()
    again = on("cuda", seed=1, **actor)
    again.load(tmp_path / "1")
    for step in range(2, STEPS):
        expected = pytest.approx(train_step(cpu, step), rel=5e-4, abs=1e-5)
        assert train_step(gpu, step) == expected
        assert train_step(again, step) == expected
    shards = {s.name: s.local.cpu() for s in gpu.weight_shards()}
    for shard in cpu.weight_shards():
        torch.testing.assert_close(shards[shard.name], shard.local, rtol=0, atol=5e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_kernel_for_sequences_of_any_lengths_is_as_near_to_the_cpu_as_rows_with_padding(compiled, recomputed):
    """In bfloat16, since the kernel takes no float32; three steps with micro-batches of many shapes."""
    cpu = on("cpu")
    padded, unpadded = (
        on(
            "cuda",
            mixed_precision="bfloat16",
            use_torch_compile=compiled,
            gradient_checkpointing=recomputed,
            use_remove_padding=removed,
        )
        for removed in (False, True)
    )
    assert unpadded._model.config._attn_implementation == IN_ONE_KERNEL
    exact = log_probs_by_row(cpu, shared=False)
    off = {}
    for name, backend in (("padded", padded), ("unpadded", unpadded)):
        found = log_probs_by_row(backend, shared=False)
        assert found.keys() == exact.keys()
        off[name] = max(float((found[row] - values).abs().max()) for row, values in exact.items())
    assert 0 < off["unpadded"] <= max(2 * off["padded"], 0.02)
    for step, cap in enumerate((1024, 15, 30)):
        ours, other = train_step(unpadded, step, cap=cap), train_step(cpu, step)
        assert ours["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=0.1)
        assert ours["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=0.02)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("megatron", marks=MEGATRON)])
def test_padding_is_left_out_unasked_where_the_kernel_can(strategy):
    assert not on("cuda", strategy=strategy, mixed_precision="bfloat16").pads
    assert on("cuda", strategy=strategy).pads  # float32
    assert on("cuda", strategy=strategy, mixed_precision="bfloat16", use_remove_padding=False).pads


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, list[dict[str, float]]]]]:
    """`spread(name)`: where the ranks of a variant left what they have, and the loss curve. All variants are started by the first."""
    pool = ThreadPoolExecutor(AT_ONCE)

    def start(variant: Variant) -> tuple[Path, Future[list[dict[str, float]]]]:
        path = tmp_path_factory.mktemp(variant.name)
        for name in ("shards", "log_probs"):
            (path / name).mkdir()
        task = {
            "steps": STEPS, "save_at": [2], "cap": 15, "device": "cuda", "background": True, "actor": variant.actor, "experts": variant.experts,
            "shards": str(path / "shards"), "log_probs": str(path / "log_probs"),
        }  # fmt: skip
        return path, pool.submit(launch, path, 2, **task)

    has_megatron = importlib.util.find_spec("megatron") is not None
    variants = [param.values[0] for param in SPREAD]
    started = {v.name: start(v) for v in variants if has_megatron or v.actor.get("strategy") != "megatron"}
    yield lambda name: (started[name][0], started[name][1].result())
    pool.shutdown(cancel_futures=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
@pytest.mark.parametrize("variant", SPREAD, ids=lambda variant: variant.name)
def test_two_gpus_train_like_one_cpu_rank(variant, spread):
    tmp_path, curve = spread(variant.name)
    cpu = on("cpu", experts=variant.experts)
    for row, values in log_probs_by_row(cpu, shared=not variant.actor.get("use_remove_padding")).items():
        ranks = [torch.load(tmp_path / "log_probs" / f"{rank}.pt", weights_only=False) for rank in range(2)]
        got = [rank[row] for rank in ranks if row in rank]
        assert got
        for other in got:
            torch.testing.assert_close(other, values, rtol=0, atol=1e-4)
    for ours in curve:
        assert ours == pytest.approx(train_step(cpu, cpu.steps), rel=5e-4, abs=1e-5)
    weights = {shard.name: shard.local for shard in cpu.weight_shards()}
    parts = [torch.load(tmp_path / "shards" / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for shard in (shard for rank in parts for shard in rank):
        rows = weights[shard.name][shard.row_start : shard.row_start + len(shard.local)]
        torch.testing.assert_close(shard.local, rows, rtol=0, atol=1e-4)
    assert sum(shard.local.numel() for rank in parts for shard in rank) == sum(w.numel() for w in weights.values())
    again = on("cpu", seed=1, experts=variant.experts)
    again.load(tmp_path / "checkpoints" / "step_2")
    assert train_step(again, 2) == pytest.approx(curve[2], rel=5e-4, abs=1e-5)


def peak_gib(**actor) -> float:
    """GPU memory of a 0.2 B model with its optimizer and one step."""
    gc.collect()  # backends before this one
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    config = Qwen3Config(
        vocab_size=32000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    backend = make_backend(
        AutoModelForCausalLM.from_config(config),
        make_actor(mixed_precision="bfloat16", gradient_checkpointing=True, **settings({"actor": actor})),
        temperature=1.0,
        device="cuda",
    )
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, 32000, (16, 1024), device="cuda")
    full = torch.ones(16, 1024, device="cuda")
    mask = full.bool()
    mask[:, :8] = False
    metrics = backend.update(
        [MicroBatch(ids, full.bool(), mask, full, full, Sequences.of_rows(mask))], token_tis(16 * 1016)
    )
    assert metrics["actor/skipped_steps"] == 0
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def test_offloading_saves_gpu_memory():
    plain = peak_gib()
    moments = peak_gib(fsdp_config={"optimizer_offload": True})
    everything = peak_gib(fsdp_config={"param_offload": True})
    print(f"peak GiB: plain {plain:.2f}, optimizer_offload {moments:.2f}, param_offload {everything:.2f}")
    assert moments < plain - 1.0  # Adam's moments of 0.18 B float32 weights are 1.4 GiB, away while activations peak
    assert everything < plain - 2.0  # and weights and gradients another 1.4
