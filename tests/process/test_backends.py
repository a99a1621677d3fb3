"""Every backend and every way to spread it over ranks: the same log-probs, loss curve, weights and checkpoints."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_launch import launch
from fsdp2_ranks import (
    log_probs_by_row,
    make_actor,
    make_batches,
    make_groups,
    make_model,
    save,
    settings,
    token_tis,
    train_step,
)

from psrl.trainer.backends.base import WeightShard
from psrl.trainer.backends.core import BackendCore
from psrl.trainer.backends.make import make_backend
from psrl.trainer.batch import count_loss_tokens

pytestmark = pytest.mark.process

STEPS, SAVED_AT = 4, 2
LOSS = {"entropy_coeff": 0.1}
MEGATRON = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")


@dataclass(frozen=True)
class Variant:
    name: str
    world_size: int
    actor: dict[str, Any] = field(hash=False)
    experts: int = 0


def with_experts(
    name: str, world_size: int, actor: dict[str, Any] | None = None, *, slow: bool = False, **megatron: object
):
    """A model with four experts in each layer, on Megatron."""
    actor = {"strategy": "megatron", "megatron": megatron, **(actor or {})}
    variant = Variant(f"experts-{name}", world_size, actor, experts=4)
    return pytest.param(variant, marks=[MEGATRON, pytest.mark.slow] if slow else [MEGATRON])


VARIANTS = [
    pytest.param(Variant("fsdp2-2", 2, {})),
    pytest.param(Variant("hsdp-2x1", 2, {"fsdp_config": {"fsdp_size": 1}})),
    pytest.param(Variant("ulysses-2", 2, {"ulysses_sequence_parallel_size": 2})),
    pytest.param(Variant("unpadded-2", 2, {"use_remove_padding": True})),
    pytest.param(Variant("megatron-1", 1, {"strategy": "megatron"}), marks=MEGATRON),
    pytest.param(
        Variant("megatron-tp2", 2, {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}}),
        marks=MEGATRON,
    ),
    pytest.param(Variant("megatron-dp2", 2, {"strategy": "megatron"}), marks=MEGATRON),
    pytest.param(
        Variant("megatron-unpadded-1", 1, {"strategy": "megatron", "use_remove_padding": True}), marks=MEGATRON
    ),
    pytest.param(
        Variant("megatron-pp2", 2, {"strategy": "megatron", "megatron": {"pipeline_model_parallel_size": 2}}),
        marks=MEGATRON,
    ),
    pytest.param(
        Variant("megatron-cp2", 2, {"strategy": "megatron", "megatron": {"context_parallel_size": 2}}),
        marks=[MEGATRON, pytest.mark.slow],
    ),
    pytest.param(
        Variant("megatron-dp2-whole", 2, {"strategy": "megatron", "megatron": {"use_distributed_optimizer": False}}),
        marks=[MEGATRON, pytest.mark.slow],
    ),
    pytest.param(
        Variant(
            "megatron-tp2-pp2",
            4,
            {
                "strategy": "megatron",
                "megatron": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            },
        ),
        marks=[MEGATRON, pytest.mark.slow],
    ),
    pytest.param(
        Variant(
            "megatron-unpadded-tp2-pp2",
            4,
            {
                "strategy": "megatron",
                "use_remove_padding": True,
                "gradient_checkpointing": True,
                "megatron": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            },
        ),
        marks=[MEGATRON, pytest.mark.slow],
    ),
    pytest.param(Variant("experts-fsdp2-2", 2, {}, experts=4)),
    pytest.param(
        Variant("experts-ulysses-2", 2, {"ulysses_sequence_parallel_size": 2}, experts=4), marks=pytest.mark.slow
    ),
    pytest.param(Variant("experts-unpadded-2", 2, {"use_remove_padding": True}, experts=4), marks=pytest.mark.slow),
    with_experts("megatron-1", 1),
    with_experts("megatron-tp2", 2, tensor_model_parallel_size=2),
    with_experts("megatron-ep2", 2, expert_model_parallel_size=2),
    with_experts("megatron-dp2", 2, slow=True),
    with_experts("megatron-ep2-whole", 2, slow=True, expert_model_parallel_size=2, use_distributed_optimizer=False),
    with_experts("megatron-dp2-ep2", 4, slow=True, expert_model_parallel_size=2),
    with_experts("megatron-dp2-ep2-whole", 4, slow=True, expert_model_parallel_size=2, use_distributed_optimizer=False),
    with_experts("megatron-tp2-ep2", 4, slow=True, tensor_model_parallel_size=2, expert_model_parallel_size=2),
    # More ranks than tensors of experts to deal.
    with_experts("megatron-dp3-pp2", 6, slow=True, pipeline_model_parallel_size=2),
    with_experts("megatron-pp2-ep2", 4, slow=True, pipeline_model_parallel_size=2, expert_model_parallel_size=2),
    with_experts(
        "megatron-unpadded-pp2-ep2",
        4,
        {"use_remove_padding": True, "gradient_checkpointing": True},
        slow=True,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
    ),
    with_experts("megatron-cp2-ep2", 2, slow=True, context_parallel_size=2, expert_model_parallel_size=2),
    pytest.param(
        Variant("megatron-dp2-pp2", 4, {"strategy": "megatron", "megatron": {"pipeline_model_parallel_size": 2}}),
        marks=[MEGATRON, pytest.mark.slow],
    ),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


@dataclass
class Ran:
    """What the ranks of a variant left: the loss curve of rank 0, log-probs by row, shards of the last weights, checkpoints,
    and the curve from a checkpoint of FSDP2 on."""

    curve: list[dict[str, float]]
    resumed: list[dict[str, float]]
    log_probs: list[dict[tuple[int, ...], torch.Tensor]]
    shards: list[list[WeightShard]]
    checkpoint: Path


@pytest.fixture(scope="module")
def of_fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A directory with a checkpoint of FSDP2 on one rank, for a number of experts."""

    @cache
    def saved(experts: int) -> Path:
        root = tmp_path_factory.mktemp("of_fsdp2")
        before = single(experts=experts)
        for step in range(SAVED_AT):
            train_step(before, step, **LOSS)
        save(before, root, SAVED_AT)
        return root

    return saved


@pytest.fixture(scope="module")
def ran(of_fsdp2: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory):
    """Each variant runs once."""

    @cache
    def run(variant: Variant) -> Ran:
        tmp = tmp_path_factory.mktemp(variant.name)
        for name in ("shards", "log_probs"):
            (tmp / name).mkdir()
        common = {"steps": STEPS, "cap": 15, "actor": variant.actor, "loss": LOSS, "experts": variant.experts}
        resumed = common | {"checkpoints": str(of_fsdp2(variant.experts)), "save_at": [], "seed": 1}
        rows = launch(
            tmp,
            variant.world_size,
            **common,
            save_at=[SAVED_AT],
            shards=str(tmp / "shards"),
            log_probs=str(tmp / "log_probs"),
            then=resumed,
        )
        left = {
            name: [torch.load(tmp / name / f"{rank}.pt", weights_only=False) for rank in range(variant.world_size)]
            for name in ("shards", "log_probs")
        }
        checkpoint = tmp / "checkpoints" / f"step_{SAVED_AT}"
        return Ran(rows[:STEPS], rows[STEPS:], left["log_probs"], left["shards"], checkpoint)

    return run


def single(actor: dict[str, Any] | None = None, seed: int = 0, experts: int = 0) -> BackendCore:
    model = make_model(seed=seed, experts=experts)
    return make_backend(model, make_actor(**settings({"actor": actor or {}})), temperature=0.8)


Reference = tuple[BackendCore, list[dict[str, float]]]


@pytest.fixture(scope="module")
def reference() -> Callable[[Variant], Reference]:
    """FSDP2 on one rank, after all steps, which is plain PyTorch (test_fsdp2.py compares it with autograd)."""

    @cache
    def trained(experts: int) -> Reference:
        backend = single(experts=experts)
        return backend, [train_step(backend, step, cap=1024, **LOSS) for step in range(STEPS)]

    return lambda variant: trained(variant.experts)


@every_variant
def test_log_probs_are_those_of_one_rank(variant, ran):
    expected = log_probs_by_row(single(experts=variant.experts), shared=not variant.actor.get("use_remove_padding"))
    got: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in ran(variant).log_probs:
        for row, values in rank.items():
            torch.testing.assert_close(got.setdefault(row, values), values, rtol=0, atol=0)
    assert got.keys() == expected.keys()
    for row, values in expected.items():
        torch.testing.assert_close(got[row], values, rtol=0, atol=1e-4)


@every_variant
def test_the_loss_curve_is_that_of_one_rank(variant, ran, reference):
    _, expected = reference(variant)
    assert len({row["actor/pg_loss"] for row in expected}) == STEPS
    for ours, other in zip(ran(variant).curve, expected, strict=True):
        assert ours == pytest.approx(other, rel=2e-4, abs=2e-6)


@every_variant
def test_published_shards_cover_the_trained_weights_once(variant, ran, reference):
    backend, _ = reference(variant)
    ranks = ran(variant).shards
    names = [shard.name for shard in ranks[0]]
    assert all([shard.name for shard in rank] == names for rank in ranks)
    weights = {shard.name: shard.local for shard in backend.weight_shards()}
    assert set(names) == weights.keys()
    for parts in zip(*ranks, strict=True):
        full = torch.full(parts[0].full_shape, torch.nan)
        for part in parts:
            rows = full[part.row_start : part.row_start + len(part.local)]
            assert rows.isnan().all(), f"{part.name} is published twice"
            rows.copy_(part.local)
        torch.testing.assert_close(full, weights[parts[0].name], rtol=0, atol=5e-5)


@every_variant
def test_its_checkpoint_goes_on_in_fsdp2_on_one_rank(variant, ran, reference):
    backend = single(seed=1, experts=variant.experts)
    backend.load(ran(variant).checkpoint)
    assert backend.steps == SAVED_AT
    for step in range(SAVED_AT, STEPS):
        assert train_step(backend, step, **LOSS) == pytest.approx(reference(variant)[1][step], rel=2e-4, abs=2e-6)


@every_variant
def test_a_checkpoint_of_fsdp2_goes_on_in_it(variant, ran, reference):
    for ours, other in zip(ran(variant).resumed, reference(variant)[1][SAVED_AT:], strict=True):
        assert ours == pytest.approx(other, rel=2e-4, abs=2e-6)


def test_ulysses_with_fewer_key_value_heads_than_ranks(tmp_path):
    expected = make_backend(make_model(kv_heads=1), make_actor(), temperature=0.8)
    curve = [train_step(expected, step) for step in range(2)]
    ulysses = {"ulysses_sequence_parallel_size": 2}
    for ours, other in zip(launch(tmp_path, 2, steps=2, save_at=[], kv_heads=1, actor=ulysses), curve, strict=True):
        assert ours == pytest.approx(other, rel=2e-4, abs=2e-6)


STRATEGIES = ["fsdp2", pytest.param("megatron", marks=MEGATRON)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_remembered_weights_are_seen_and_gone_back_to(strategy, dtype):
    backend, undisturbed = (single({"strategy": strategy, "mixed_precision": dtype}) for _ in range(2))
    rows = log_probs_by_row(backend)
    train_step(backend, 0)
    train_step(undisturbed, 0)
    before = log_probs_by_row(backend)
    backend.remember()
    with backend.as_remembered():
        assert_equal(log_probs_by_row(backend), before)
    train_step(backend, 1)
    after = log_probs_by_row(backend)
    with backend.as_remembered():
        assert_equal(log_probs_by_row(backend), before)
    assert_equal(log_probs_by_row(backend), after)
    backend.go_back()
    assert backend.steps == 1
    assert_equal(log_probs_by_row(backend), before)
    assert train_step(backend, 1) == train_step(undisturbed, 1)
    assert any(not torch.equal(rows[row], before[row]) for row in rows)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_and_divided_gradients_are_those_of_the_update(strategy):
    whole, parts = (single({"strategy": strategy}) for _ in range(2))
    batches = make_batches(make_groups(0), 0, 1, 15)
    assert len(batches) > 2
    tokens = count_loss_tokens(batches)
    expected = whole.update(batches, token_tis(tokens))
    for batch in batches:
        parts.accumulate([batch], token_tis(1))
    got = parts.apply_gradients(float(tokens))
    assert got["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    moments = whole._state()  # 0.1 x gradient after the first step
    for name, value in parts._state().items():
        if name.startswith("exp_avg."):
            torch.testing.assert_close(value, moments[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_backend_has_log_probs_and_no_gradients(strategy):
    actor = make_actor(**settings({"actor": {"strategy": strategy}}))
    frozen = make_backend(make_model(), actor, temperature=0.8, trainable=False)
    assert_equal(log_probs_by_row(frozen), log_probs_by_row(single({"strategy": strategy})))
    assert not any(parameter.requires_grad for parameter in frozen._model.parameters())


def assert_equal(left: dict[tuple[int, ...], torch.Tensor], right: dict[tuple[int, ...], torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[row], right[row]) for row in left)
