"""What is Megatron's alone: the other families, what it refuses, padding of the vocabulary, its mixed precision."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from backend_launch import launch
from fsdp2_ranks import VOCABULARY, make_actor, make_batches, make_groups, make_model, train_step
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from psrl.config.megatron import MegatronConfig
from psrl.trainer.backends.fsdp2 import FSDP2Backend
from psrl.trainer.backends.make import make_backend

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama3-rope": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "qwen2-tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2-untied": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen3-wide-heads": Qwen3Config(**SMALL, head_dim=32),
    "qwen3-moe": Qwen3MoeConfig(
        **SMALL, head_dim=32, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "qwen3-moe-weights-as-they-are": Qwen3MoeConfig(
        **SMALL, num_experts=8, num_experts_per_tok=1, moe_intermediate_size=24, norm_topk_prob=False
    ),
}


def model_of(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # zeros and ones hide a wrong mapping
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def megatron(model, **changes):
    return make_backend(model, make_actor(strategy="megatron", **changes), temperature=0.8)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_gives_the_log_probs_and_steps_of_hugging_face(name):
    ours, theirs = megatron(model_of(MODELS[name])), FSDP2Backend(model_of(MODELS[name]), make_actor(), temperature=0.8)
    for shared in (False, True):
        for batch in make_batches(make_groups(3, num_groups=4, size=5), 0, 1, 64, shared):
            torch.testing.assert_close(ours.log_probs(batch), theirs.log_probs(batch), rtol=0, atol=1e-5)
    for step in range(3):
        assert train_step(ours, step) == pytest.approx(train_step(theirs, step), rel=1e-4, abs=1e-6)


def test_gradient_checkpointing_recomputes_and_changes_nothing():
    plain, saving = megatron(make_model()), megatron(make_model(), gradient_checkpointing=True)
    calls = []
    saving._model.decoder.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for step in range(2):
        assert train_step(saving, step) == pytest.approx(train_step(plain, step), rel=1e-6)
    assert len(calls) == 4


def test_bfloat16_compute_keeps_float32_weights():
    mixed, exact = megatron(make_model(), mixed_precision="bfloat16"), megatron(make_model())
    for step in range(2):
        ours, other = train_step(mixed, step, cap=15), train_step(exact, step, cap=15)
        assert ours != other
        assert ours["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=0.1)
    assert {shard.local.dtype for shard in mixed.weight_shards()} == {torch.float32}
    assert {p.dtype for p in mixed._model.parameters()} == {torch.bfloat16}
    seen = dict(mixed._model.named_parameters())
    assert all(torch.equal(seen[name], weight.bfloat16()) for name, weight in mixed._parameters.items())


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (GPT2Config(), 1, "strategy=megatron trains llama, qwen2, qwen3, qwen3_moe, not gpt2: use .*strategy=fsdp2"),
        (LlamaConfig(**SMALL, attention_bias=True), 1, "biases=True"),
        (Qwen3Config(**SMALL), 3, "tensor_model_parallel_size=3 does not divide the model's attention heads .4."),
        (Qwen3Config(**SMALL), 4, "tensor_model_parallel_size=4 does not divide the model's key-value heads .2."),
        (Qwen3Config(**SMALL | {"intermediate_size": 97}), 2, "the model's feed-forward size .97."),
        (
            Qwen3MoeConfig(**SMALL, num_experts=3),
            2,
            "tensor_model_parallel_size=2 does not divide the model's 3 experts",
        ),
        (Qwen3MoeConfig(**SMALL, num_experts=4, mlp_only_layers=[1]), 1, "has dense layers among those with experts"),
        (Qwen3MoeConfig(**SMALL, num_experts=4, decoder_sparse_step=2), 1, "has dense layers among those with experts"),
    ],
)
def test_models_that_cannot_be_are_refused(config, size, message):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message):
        megatron(model, megatron=MegatronConfig(tensor_model_parallel_size=size))


def test_tensor_parallel_ranks_that_would_choose_other_experts_follow_the_first(tmp_path):
    """Their routers drift apart by rounding at most; here they are opposite, so that a choice of its own would show."""
    [found] = launch(tmp_path, 2, script="expert_ranks")
    assert found["gap"] < 1e-5
