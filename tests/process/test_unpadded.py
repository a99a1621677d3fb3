"""Micro-batches without padding against the same ones with it: log-probs, entropies, values, gradients, whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from critic_ranks import make_critic, with_head
from critic_ranks import train_step as train_critic
from fsdp2_ranks import (
    VOCABULARY,
    end_process_group,
    make_actor,
    make_batches,
    make_groups,
    make_model,
    token_tis,
    train_step,
)
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

from psrl.algorithms.sequences import Sequences
from psrl.algorithms.token_log_probs import token_log_probs
from psrl.config.schema import OptimConfig
from psrl.trainer.backends import fsdp2, unpadded
from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.backends.fsdp2 import FSDP2Backend
from psrl.trainer.batch import SampleIndex, build_micro_batches, count_loss_tokens

pytestmark = pytest.mark.process

LENGTHS = {
    "a tail": [64, 30, 9, 5, 3, 2, 2],
    "from 1 token": [40, 1, 2, 1, 17],
    "all equal": [12] * 5,
    "one sequence": [33],
    "two tokens": [2],
}
NEAR = {"rtol": 1e-6, "atol": 1e-6}
every_shape = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    end_process_group()


def micro_batch(lengths: Sequence[int], seed: int = 0) -> MicroBatch:
    """Rows of random tokens; what follows the end of a row is random too, and most of what does not is trained."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    real = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    mask = real & (torch.rand(shape, generator=generator) < 0.8)
    mask[:, 0] = False
    return MicroBatch(
        input_ids=torch.randint(0, VOCABULARY, shape, generator=generator),
        attention_mask=real,
        loss_mask=mask,
        advantages=torch.randn(shape, generator=generator) * mask,
        rollout_log_probs=-5.0 + torch.randn(shape, generator=generator),
        sequences=Sequences.of_rows(mask),
    )


def both(**changes) -> tuple[FSDP2Backend, FSDP2Backend]:
    """With padding and without."""
    plain, removed = (
        FSDP2Backend(make_model(), make_actor(use_remove_padding=remove, **changes), temperature=0.8)
        for remove in (False, True)
    )
    return plain, removed


@every_shape
def test_log_probs_and_entropies_are_those_with_padding(lengths):
    (plain, removed), batch = both(), micro_batch(lengths)
    with torch.no_grad():
        expected, got = (backend._token_outputs(batch, entropy=True) for backend in (plain, removed))
    for ours, other in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, other, **NEAR)
        assert torch.equal(ours[~batch.loss_mask], torch.zeros(int((~batch.loss_mask).sum())))
    assert batch.loss_mask.any() == bool(got[0].any())


@every_shape
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_is_the_one_with_padding(lengths, recomputed):
    """Its gradients too, which after one step from nothing are ten times the first moment. Adam divides by the second one, so
    weights whose gradient is next to nothing differ a little more."""
    plain, removed = both(gradient_checkpointing=recomputed, grad_clip=0.0)
    for step in range(2):
        batches = [micro_batch(lengths, seed) for seed in (step, 10 + step)]
        loss = token_tis(max(count_loss_tokens(batches), 1), entropy_coeff=0.1)
        assert removed.update(batches, loss) == pytest.approx(plain.update(batches, loss), rel=1e-5, abs=1e-6)
        theirs = removed._state()
        for name, value in plain._state().items():
            off = (theirs[name] - value).float().norm()
            assert off <= (1e-6 if name.startswith("exp_avg.") else 5e-6) * value.float().norm(), name


def test_the_model_runs_on_real_tokens_only():
    seen = []
    for backend in both():
        backend._model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
        backend.log_probs(micro_batch([20, 3, 1]))
    assert seen == [(3, 20), (1, 24)]


def test_a_row_by_hand():
    batch = replace(
        micro_batch([3, 2]),
        input_ids=torch.tensor([[5, 6, 7], [8, 9, 0]]),
    )
    row = unpadded.without_padding(batch)
    inputs, places = unpadded.keywords(row), row.places[torch.tensor([1, 3, 4])]
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 5] and inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == 3
    assert places.tolist() == [1, 3, 4]
    places = unpadded.without_padding(micro_batch([2, 3])).places[torch.tensor([0, 1, 3, 5])]
    assert places.tolist() == [0, 1, 2, 4]


def test_a_micro_batch_that_only_keeps_other_ranks_company():
    backend = both(optim=OptimConfig(lr=1e-3, weight_decay=0.0))[1]
    (dummy,) = build_micro_batches([()], SampleIndex([], []), {}, {})
    assert backend.update([dummy], token_tis(0))["actor/grad_norm"] == 0.0


@every_shape
def test_values_are_those_with_padding(lengths):
    plain, removed = (with_head(make_critic({"use_remove_padding": remove})) for remove in (False, True))
    batch = micro_batch(lengths)
    torch.testing.assert_close(removed.values(batch), plain.values(batch), **NEAR)


def test_a_critic_learns_as_with_padding():
    plain, removed = (with_head(make_critic({"use_remove_padding": remove})) for remove in (False, True))
    for step in range(3):
        assert train_critic(removed, step, cap=30) == pytest.approx(
            train_critic(plain, step, cap=30), rel=1e-4, abs=2e-6
        )


def test_a_frozen_reference_scores_as_with_padding():
    plain, removed = (
        FSDP2Backend(make_model(), make_actor(use_remove_padding=remove), temperature=0.8, trainable=False)
        for remove in (False, True)
    )
    batch = micro_batch(LENGTHS["a tail"])
    torch.testing.assert_close(removed.log_probs(batch), plain.log_probs(batch), **NEAR)


def test_in_bfloat16_it_is_as_near_to_float32_as_with_padding():
    exact, _ = both()
    batch = micro_batch(LENGTHS["a tail"])
    right = exact.log_probs(batch)
    plain, removed = (float((b.log_probs(batch) - right).abs().max()) for b in both(mixed_precision="bfloat16"))
    assert 0 < removed < 2 * plain


def test_micro_batches_of_many_shapes_are_compiled_once(monkeypatch):
    """Without the slow part of compilation, which is not what is asked."""
    compile_any = torch.compile
    monkeypatch.setattr(fsdp2, "token_log_probs", lambda *args, fused: token_log_probs(*args))
    monkeypatch.setattr(torch, "compile", lambda function, **keys: compile_any(function, backend="aot_eager", **keys))
    torch._dynamo.reset()
    plain, compiled = both()[0], both(use_torch_compile=True)[1]
    graphs = []
    for step, cap in enumerate((64, 15, 30, 64)):
        expected = train_step(plain, step, cap)
        assert train_step(compiled, step, cap) == pytest.approx(expected, rel=1e-4, abs=2e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == graphs[:1] * 4 and graphs[0] > 0
    torch._dynamo.reset()


def test_the_kernel_is_given_what_it_asks_for(monkeypatch):
    """There is none on a CPU: one of the same form stands in."""

    def stand_in(q, k, v, begins_q, begins_k, longest_q, longest_k, *, scale, window_size, enable_gqa=True):
        assert window_size == (-1, 0) and longest_q == longest_k == 9 and torch.equal(begins_q, begins_k)
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        out = torch.empty_like(q)
        for begin, end in pairwise(begins_q.tolist()):
            length = end - begin
            for head in range(q.shape[1]):
                kv = head * k.shape[1] // q.shape[1]
                scores = q[begin:end, head] @ k[begin:end, kv].T * scale
                future = torch.ones(length, length, dtype=torch.bool).triu(1)
                out[begin:end, head] = scores.masked_fill(future, -torch.inf).softmax(-1) @ v[begin:end, kv]
        return out

    monkeypatch.setattr(unpadded, "varlen_attn", stand_in)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 15, heads, 16, generator=generator).transpose(1, 2) for heads in (4, 2, 2))
    ends = unpadded.Ends(torch.tensor([0, 9, 10, 15], dtype=torch.int32), 9)
    kernel, one_by_one = (attend(q, k, v, ends, 0.3) for attend in (unpadded.in_one_kernel, unpadded.one_by_one))
    assert kernel.shape == (1, 15, 4, 16)
    torch.testing.assert_close(kernel, one_by_one, rtol=0, atol=1e-6)
    first = F.scaled_dot_product_attention(
        *(x[:, :, :9] for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(one_by_one[:, :9], first.transpose(1, 2), rtol=0, atol=0)


def test_the_installed_torch_takes_what_the_kernel_is_given():
    """Shapes only, forward and backward: there is no such kernel on a CPU."""
    with FakeTensorMode():
        q, k, v = (torch.empty(1, heads, 15, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        out = unpadded.in_one_kernel(q, k, v, unpadded.Ends(torch.empty(4, dtype=torch.int32), 9), 0.25)
        out.sum().backward()
    assert out.shape == (1, 15, 4, 16) and out.dtype == torch.bfloat16
    assert all(x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.parametrize(
    ("device", "dtype", "head", "way", "warned"),
    [
        ("cpu", torch.bfloat16, 16, unpadded.ONE_BY_ONE, False),
        ("cuda", torch.bfloat16, 128, unpadded.IN_ONE_KERNEL, False),
        ("cuda", torch.float32, 128, unpadded.ONE_BY_ONE, True),
        ("cuda", torch.bfloat16, 20, unpadded.ONE_BY_ONE, True),
        ("cuda", torch.bfloat16, 512, unpadded.ONE_BY_ONE, True),
    ],
)
def test_the_way_follows_from_the_device_and_a_slow_one_is_said(device, dtype, head, way, warned, caplog):
    config = make_model().config
    config.head_dim = head
    assert unpadded.attention_of(config, torch.device(device), dtype) == way
    assert unpadded.has_kernel(config, torch.device(device), dtype) is (way == unpadded.IN_ONE_KERNEL)
    assert ["one by one (slow)" in record.getMessage() for record in caplog.records] == [True] * warned


def test_on_a_cpu_nobody_leaves_padding_out_unasked():
    assert [backend.pads for backend in both()] == [True, False]
    assert FSDP2Backend(make_model(), make_actor(), temperature=0.8).pads


def test_prompts_are_not_shared_and_that_is_said(caplog):
    caplog.set_level("INFO")
    plain, removed = both()
    assert plain.can_share_prompts and not removed.can_share_prompts
    assert [r.getMessage() for r in caplog.records if "use_shared_prompt is off" in r.getMessage()]
    caplog.clear()
    both(use_shared_prompt=False)
    assert not caplog.records


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"use_remove_padding=True cannot be had with .*parallel_size=2: leave one"):
        FSDP2Backend(
            make_model(), make_actor(use_remove_padding=True, ulysses_sequence_parallel_size=2), temperature=1.0
        )
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=1,
    )  # fmt: skip
    windowed = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"use_remove_padding=True needs full attention in every layer: use False"):
        FSDP2Backend(windowed, make_actor(use_remove_padding=True), temperature=1.0)


def test_it_is_told_of_shared_prompts_by_mistake():
    backend = both()[1]
    (batch,) = make_batches(make_groups(3, num_groups=4, size=5), 0, 1, 1024, shared=True)
    with pytest.raises(AssertionError, match="share prompts"):
        backend.log_probs(batch)
