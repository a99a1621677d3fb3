"""The FSDP2 backend against plain PyTorch, on one rank and on two real gloo processes."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backend_launch import launch
from fsdp2_ranks import (
    end_process_group,
    make_actor,
    make_batches,
    make_groups,
    make_model,
    save,
    token_tis,
    train_step,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from psrl.algorithms import policy
from psrl.config.schema import OptimConfig
from psrl.trainer import checkpoints
from psrl.trainer.backends.core import row_range
from psrl.trainer.backends.fsdp2 import FSDP2Backend
from psrl.trainer.batch import SampleIndex, build_micro_batches, count_loss_tokens

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    end_process_group()


def stored(path: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(path, tmp_path / "plain.pt")
    return torch.load(tmp_path / "plain.pt", weights_only=True)


def make_backend(*, tied: bool = True, seed: int = 0, temperature: float = 0.8, **changes) -> FSDP2Backend:
    return FSDP2Backend(make_model(tied, seed), make_actor(**changes), temperature=temperature)


def gradients_of(backend: FSDP2Backend, cap: int, tmp_path: Path, name: str) -> dict[str, torch.Tensor]:
    """After one step from fresh optimizer state the first moment is (1 - beta1) x gradient."""
    train_step(backend, 0, cap)
    backend.save(tmp_path / name)
    state = stored(tmp_path / name, tmp_path)
    return {k: v / 0.1 for k, v in state.items() if k.startswith("exp_avg.")}


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_equal_those_of_each_sample_alone(temperature, tied):
    backend = make_backend(tied=tied, temperature=temperature)
    model = make_model(tied).double()
    for batch in make_batches(make_groups(0), 0, 1, cap=64):
        log_probs = backend.log_probs(batch)
        assert not log_probs.requires_grad
        assert torch.equal(log_probs[~batch.loss_mask], torch.zeros(int((~batch.loss_mask).sum())))
        for row in range(len(batch.input_ids)):
            ids = batch.input_ids[row][batch.attention_mask[row]]
            with torch.no_grad():
                reference = torch.log_softmax(model(input_ids=ids[None]).logits[0] / temperature, -1)
            for column in batch.loss_mask[row].nonzero().flatten().tolist():
                expected = reference[column - 1, ids[column]].item()
                assert log_probs[row, column].item() == pytest.approx(expected, abs=1e-5)


def test_gradient_equals_autograd_on_the_whole_model(tmp_path):
    gradients = gradients_of(make_backend(grad_clip=0.0), 1024, tmp_path, "ours")
    model = make_model().double()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in make_batches(make_groups(0), 0, 1, cap=16):
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1] / 0.8
        log_probs = torch.log_softmax(logits, -1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
        mask = batch.loss_mask[:, 1:]
        weights = torch.exp(log_probs.detach() - batch.rollout_log_probs[:, 1:]).clamp(max=2.0)
        total = total - (weights * batch.advantages[:, 1:] * log_probs)[mask].sum()
        tokens += int(mask.sum())
    (total / tokens).backward()
    assert_close(gradients, {f"exp_avg.{n}": p.grad.float() for n, p in model.named_parameters()}, atol=1e-6)


@pytest.mark.parametrize("cap", [14, 30, 60])
def test_gradient_does_not_depend_on_the_split_into_micro_batches(tmp_path, cap):
    whole = make_batches(make_groups(0), 0, 1, 1024)
    split = make_batches(make_groups(0), 0, 1, cap)
    assert len(whole) == 1 < len(split)
    expected = gradients_of(make_backend(), 1024, tmp_path, "whole")
    assert_close(gradients_of(make_backend(), cap, tmp_path, "split"), expected, atol=1e-6)


def test_two_ranks_train_like_one(tmp_path):
    """Same loss curve, gradient and weights as the plain single-process model, also with uneven shards and dummies."""
    plans = [[make_batches(make_groups(step), rank, 2, cap=15) for rank in range(2)] for step in range(4)]
    assert any(not batch.loss_mask.any() for plan in plans for rank in plan for batch in rank)
    reference = make_backend()
    expected = [train_step(reference, step, cap=1024) for step in range(4)]
    shards = tmp_path / "shards"
    shards.mkdir()
    curve = launch(tmp_path, 2, steps=4, save_at=[1, 2], cap=15, shards=str(shards))
    for ours, other in zip(curve, expected, strict=True):
        assert ours == pytest.approx(other, rel=1e-4, abs=1e-6)

    first = stored(tmp_path / "checkpoints" / "step_1", tmp_path)
    fresh = make_backend()
    moments = {name: value * 0.1 for name, value in gradients_of(fresh, 1024, tmp_path, "one").items()}
    assert_close({k: v for k, v in first.items() if k.startswith("exp_avg.")}, moments, atol=1e-7)

    ranks = [torch.load(shards / f"{rank}.pt", weights_only=False) for rank in range(2)]
    names = [name for name, _ in make_model().named_parameters()]
    assert all([shard.name for shard in rank] == names for rank in ranks)
    for parts, (_, weight) in zip(zip(*ranks, strict=True), reference._model.named_parameters(), strict=True):
        full = torch.full(parts[0].full_shape, torch.nan)
        for part in parts:
            full[part.row_start : part.row_start + len(part.local)] = part.local
        torch.testing.assert_close(full, weight.detach(), rtol=0, atol=2e-5)

    # A fresh pair of processes with other initial weights goes on from step 2 exactly as the first pair did.
    (tmp_path / "again").mkdir()
    (tmp_path / "checkpoints" / "step_2").rename(tmp_path / "again" / "step_2")
    again = launch(tmp_path, 2, steps=4, save_at=[], cap=15, seed=1, checkpoints=str(tmp_path / "again"))
    assert again == curve[2:]

    # A checkpoint of two ranks loads on one.
    single = make_backend(seed=1)
    single.load(tmp_path / "again" / "step_2")
    assert single.steps == 2
    assert train_step(single, 2) == pytest.approx(expected[2], rel=1e-4, abs=1e-6)


def test_a_save_that_is_killed_is_ignored_and_replaced(tmp_path):
    root = tmp_path / "checkpoints"
    first = make_backend()
    train_step(first, 0)
    save(first, root, 1)
    launch(tmp_path, 1, expect=-signal.SIGKILL, steps=2, save_at=[2], killed=True)
    found, skipped = checkpoints.newest_complete(root)
    assert found == root / "step_1"
    assert [name for name, _ in skipped] == ["step_2"]
    backend = make_backend(seed=1)
    backend.load(found)
    train_step(backend, 1)
    save(backend, root, 2)
    assert checkpoints.newest_complete(root) == (root / "step_2", [])


def test_a_truncated_state_is_refused_by_load(tmp_path):
    backend = make_backend()
    backend.save(tmp_path / "state")
    (data,) = (tmp_path / "state").glob("*.distcp")
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2)
    with pytest.raises(RuntimeError, match=rf"cannot load the checkpoint {tmp_path / 'state'}"):
        make_backend().load(tmp_path / "state")


def test_an_all_masked_micro_batch_alone_gives_zero_loss_and_no_nan():
    backend = make_backend(optim=OptimConfig(lr=1e-3, weight_decay=0.0))
    (dummy,) = build_micro_batches([()], SampleIndex([], []), {}, {})
    before = [shard.local.clone() for shard in backend.weight_shards()]
    sums = backend.update([dummy], token_tis(0))
    assert sums["actor/sums/loss"] == 0.0
    assert sums["actor/grad_norm"] == 0.0
    assert all(torch.equal(shard.local, old) for shard, old in zip(backend.weight_shards(), before, strict=True))


def test_no_micro_batch_takes_no_step():
    backend = make_backend()
    assert backend.update([], token_tis(0))["actor/skipped_steps"] == 1.0
    assert backend.steps == 0


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_step_of_which_all_was_rejected_is_none(accumulated, caplog):
    """Neither momentum nor weight decay moves anything, and the schedule waits."""
    backend, undisturbed = make_backend(), make_backend()
    for each in (backend, undisturbed):
        train_step(each, 0)
    before = backend._state()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    batches = [replace(b, accepted=torch.zeros_like(b.loss_mask)) for b in make_batches(make_groups(1), 0, 1, 15)]
    for _ in range(2):
        if accumulated:
            backend.accumulate(batches, token_tis(1))
            metrics = backend.apply_gradients(0.0)
        else:
            metrics = backend.update(batches, token_tis(0))
        assert (metrics["actor/skipped_steps"], metrics["actor/grad_norm"]) == (1.0, 0.0)
        assert policy.finalise(metrics)["rollout_corr/rs_masked_fraction"] == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in kept.items())
    assert backend.steps == 1
    assert [r.levelname for r in caplog.records if "no token" in r.message] == ["WARNING"]
    assert train_step(backend, 1) == train_step(undisturbed, 1)


def test_a_gradient_that_is_not_finite_is_not_applied():
    backend = make_backend()
    before = [shard.local.clone() for shard in backend.weight_shards()]
    batches = make_batches(make_groups(0), 0, 1, 1024)

    def broken(log_probs, batch):
        loss, sums = token_tis(count_loss_tokens(batches))(log_probs, batch)
        return loss * torch.nan, sums

    metrics = backend.update(batches, broken)
    assert metrics["actor/skipped_steps"] == 1.0
    assert backend.steps == 0
    assert all(torch.equal(shard.local, old) for shard, old in zip(backend.weight_shards(), before, strict=True))
    assert train_step(backend, 0) == train_step(make_backend(), 0)


def test_gradient_checkpointing_recomputes_and_changes_nothing(tmp_path):
    calls = []
    plain = make_backend()
    saving = make_backend(gradient_checkpointing=True)
    for kind, backend in (("plain", plain), ("saving", saving)):
        for layer in backend._model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, kind=kind: calls.append(kind))
    expected = gradients_of(plain, 1024, tmp_path, "plain")
    assert_close(gradients_of(saving, 1024, tmp_path, "saving"), expected, atol=1e-7)
    assert calls.count("saving") == 2 * calls.count("plain") > 0
    assert [s.name for s in saving.weight_shards()] == [s.name for s in plain.weight_shards()]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_bfloat16_compute_keeps_float32_weights(gradient_checkpointing):
    mixed = make_backend(mixed_precision="bfloat16", gradient_checkpointing=gradient_checkpointing)
    exact = make_backend()
    for step in range(2):
        ours, other = train_step(mixed, step), train_step(exact, step)
        assert ours != other
        assert ours["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=0.1)
    assert {shard.local.dtype for shard in mixed.weight_shards()} == {torch.float32}
    assert [s.name for s in mixed.weight_shards()] == [s.name for s in exact.weight_shards()]


def test_entropies_and_their_gradient_equal_autograd_on_the_whole_model(tmp_path):
    backend = make_backend(grad_clip=0.0)
    batches = make_batches(make_groups(0), 0, 1, 1024)
    tokens = count_loss_tokens(batches)
    sums = backend.update(batches, token_tis(tokens, entropy_coeff=0.5))
    backend.save(tmp_path / "entropy")
    ours = {k: v / 0.1 for k, v in stored(tmp_path / "entropy", tmp_path).items() if k.startswith("exp_avg.")}
    plain = gradients_of(make_backend(grad_clip=0.0), 1024, tmp_path, "plain")
    model = make_model().double()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        log_p = torch.log_softmax(model(input_ids=batch.input_ids).logits[:, :-1] / 0.8, -1)
        total = total - (log_p.exp() * log_p).sum(-1)[batch.loss_mask[:, 1:]].sum()
    assert policy.finalise(sums)["actor/entropy"] == pytest.approx(total.item() / tokens, rel=1e-5)
    (-0.5 * total / tokens).backward()
    expected = {f"exp_avg.{n}": plain[f"exp_avg.{n}"] + p.grad.float() for n, p in model.named_parameters()}
    assert_close(ours, expected, atol=1e-6)


def test_a_frozen_backend_only_scores():
    reference = FSDP2Backend(make_model(), make_actor(), temperature=0.8, trainable=False)
    (batch,) = make_batches(make_groups(0), 0, 1, 1024)
    assert torch.equal(reference.log_probs(batch), make_backend().log_probs(batch))
    assert not any(p.requires_grad for p in reference._model.parameters())


def test_warm_up_reaches_the_full_rate():
    backend = make_backend(optim=OptimConfig(lr=3e-4, lr_warmup_steps=3))
    assert [train_step(backend, step)["actor/lr"] for step in range(4)] == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4])


def test_tied_weights_appear_once():
    tied = {shard.name for shard in make_backend(tied=True).weight_shards()}
    untied = {shard.name for shard in make_backend(tied=False).weight_shards()}
    assert untied - tied == {"lm_head.weight"}


@pytest.mark.parametrize("num_rows", [1, 2, 5, 7, 8])
@pytest.mark.parametrize("world_size", [1, 2, 4, 9])
def test_row_ranges_cover_each_row_once_like_torch_chunk(num_rows, world_size):
    ranges = [row_range(num_rows, rank, world_size) for rank in range(world_size)]
    chunks = [len(chunk) for chunk in torch.arange(num_rows).chunk(world_size)]
    assert [end - start for start, end in ranges] == chunks + [0] * (world_size - len(chunks))
    assert [row for start, end in ranges for row in range(start, end)] == list(range(num_rows))


def test_unknown_compute_dtype_is_refused():
    with pytest.raises(ValueError, match=r"mixed_precision is 'fp8'; it must be one of float32, bfloat16"):
        make_backend(mixed_precision="fp8")


def test_a_model_without_output_layer_is_refused():
    with pytest.raises(ValueError, match=r"Qwen3Model has no output embeddings"):
        FSDP2Backend(make_model().model, make_actor(), temperature=1.0)


def test_shared_prompts_give_the_same_log_probs_and_gradients():
    groups = make_groups(3, num_groups=4, size=5)
    moments = {}
    for shared in (False, True):
        backend = make_backend(optim=OptimConfig(lr=1e-3, weight_decay=0.0), grad_clip=1e9)
        assert backend.can_share_prompts
        batches = make_batches(groups, 0, 1, 1024, shared)
        log_probs = torch.cat([backend.log_probs(b)[b.loss_mask] for b in batches]).sort().values
        tokens = count_loss_tokens(batches)
        assert (batches[0].layout is not None) is shared
        backend.update(batches, token_tis(tokens))
        moments[shared] = (log_probs, backend._state())
    torch.testing.assert_close(moments[True][0], moments[False][0], atol=2e-6, rtol=0)
    for name, value in moments[False][1].items():
        if name.startswith("exp_avg."):
            torch.testing.assert_close(moments[True][1][name], value, atol=1e-7, rtol=1e-4)
