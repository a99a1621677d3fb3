"""What the trainer backends refuse."""

from __future__ import annotations

import pytest

from psrl.config.backend_checks import check_backend, check_model_layout
from psrl.config.checks import check_resume
from psrl.config.errors import ConfigError
from psrl.config.schema import Config

pytestmark = pytest.mark.unit


def config(ranks: tuple[int, int] = (1, 4), **actor) -> Config:
    made = Config()
    made.psrl.deployment.train_nnodes, made.psrl.deployment.train_ngpus_per_node = ranks
    settings = made.train_actor_rollout_ref.actor
    for name, value in actor.items():
        if isinstance(value, dict):
            for key, inner in value.items():
                setattr(getattr(settings, name), key, inner)
        else:
            setattr(settings, name, value)
    return made


BUDGET = "ppo_max_token_len_per_gpu"
REFUSED = [
    (
        {BUDGET: 2047},
        r"per_gpu=2047 does not hold the longest sample .*=1024 \+ .*=1024\): raise it to at least 2048",
    ),
    (
        {BUDGET: 1023, "ulysses_sequence_parallel_size": 2},
        r"per_gpu=1023 does not hold .*=1024, shared by 2 ranks\): raise it to at least 1024",
    ),
    ({BUDGET: 99, "ppo_micro_batch_size_per_gpu": 4, "use_dynamic_bsz": True}, r"per_gpu=99 does not hold"),
    (
        {"strategy": "megatron", "megatron": {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2}},
        r"actor\.megatron\.expert_model_parallel_size=4 does not divide the trainer ranks that have the same layers \(2\): choose a divisor",
    ),
    (
        {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}},
        r"tensor_model_parallel_size=4 x pipeline_model_parallel_size=2 does not divide the 4 trainer ranks",
    ),
    ({"megatron": {"pipeline_model_parallel_size": 2}}, r"pipeline_model_parallel_size=2 has no meaning with .*fsdp2"),
    (
        {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 3}},
        r"tensor_model_parallel_size=3 does not divide the 4 trainer ranks .*: choose a divisor",
    ),
    (
        {"megatron": {"tensor_model_parallel_size": 2}},
        r"tensor_model_parallel_size=2 has no meaning with .*strategy=fsdp2",
    ),
    (
        {"ulysses_sequence_parallel_size": 3},
        r"ulysses_sequence_parallel_size=3 does not divide the 4 trainer ranks",
    ),
    *(
        ({"fsdp_config": {"fsdp_size": size}}, rf"fsdp_size={size} does not divide the 4 trainer ranks .* or -1")
        for size in (0, -2, 3, 8)
    ),
    (
        {"strategy": "megatron", "ulysses_sequence_parallel_size": 2},
        r"ulysses_sequence_parallel_size=2 has no meaning with .*strategy=megatron: leave it at 1",
    ),
    (
        {"strategy": "megatron", "use_remove_padding": True, "megatron": {"context_parallel_size": 2}},
        r"use_remove_padding=True cannot be had with .*megatron.context_parallel_size=2, .*: leave one of them out",
    ),
    (
        {"use_remove_padding": True, "ulysses_sequence_parallel_size": 2},
        r"use_remove_padding=True cannot be had with .*ulysses_sequence_parallel_size=2, .*: leave one of them out",
    ),
    (
        {"strategy": "megatron", "fsdp_config": {"param_offload": True}},
        r"param_offload=True has no meaning with .*strategy=megatron",
    ),
]


@pytest.mark.parametrize(("actor", "message"), REFUSED)
def test_refused(actor, message):
    with pytest.raises(ConfigError, match=message):
        check_backend(config(**actor), megatron_installed=True)


def test_a_missing_package_is_one_sentence():
    with pytest.raises(ConfigError, match=r"megatron-core package is not installed: `pip install 'psrl\[megatron\]'`"):
        check_backend(config(strategy="megatron"), megatron_installed=False)


@pytest.mark.parametrize(
    "actor",
    [
        {},
        {BUDGET: 2048},
        {BUDGET: 1024, "ulysses_sequence_parallel_size": 2},
        {BUDGET: 99, "ppo_micro_batch_size_per_gpu": 4},
        {"ulysses_sequence_parallel_size": 2, "fsdp_config": {"fsdp_size": 2}},
        {"use_remove_padding": True, "fsdp_config": {"fsdp_size": 2}},
        {"strategy": "megatron"},
        {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 4}},
        {"strategy": "megatron", "use_remove_padding": True, "megatron": {"tensor_model_parallel_size": 2}},
        {"strategy": "megatron", "megatron": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}},
    ],
)
def test_accepted(actor):
    check_backend(config(**actor), megatron_installed=True)


QWEN = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
}


@pytest.mark.parametrize(
    ("actor", "model", "message"),
    [
        (
            {"strategy": "megatron"},
            QWEN | {"model_type": "gemma3_text"},
            r"strategy=megatron trains llama, qwen2, qwen3, qwen3_moe, not gemma3_text: use .*strategy=fsdp2",
        ),
        (
            {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 16}},
            QWEN,
            r"tensor_model_parallel_size=16 does not divide the model's key-value heads \(8\): choose a divisor",
        ),
        (
            {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 4}},
            QWEN | {"intermediate_size": 3074},
            r"does not divide the model's feed-forward size \(3074\)",
        ),
        (
            {"strategy": "megatron", "megatron": {"pipeline_model_parallel_size": 32}},
            QWEN,
            r"pipeline_model_parallel_size=32 is more than the model's 28 layers: use fewer stages",
        ),
        (
            {"strategy": "megatron", "megatron": {"expert_model_parallel_size": 2}},
            QWEN,
            r"expert_model_parallel_size=2 has no meaning for a model without experts: leave it at 1",
        ),
        (
            {"strategy": "megatron", "megatron": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 8}},
            QWEN | {"model_type": "qwen3_moe", "num_experts": 24, "intermediate_size": 3072},
            r"expert_model_parallel_size=2 x tensor_model_parallel_size=8 does not divide the model's 24 experts",
        ),
        (
            {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 4, "context_parallel_size": 8}},
            QWEN,
            r"context_parallel_size=8 does not divide the 4 attention heads of each tensor-parallel rank",
        ),
        (
            {"strategy": "megatron"},
            QWEN | {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [0]},
            r"this qwen3_moe model has dense layers among those with experts: use .*strategy=fsdp2",
        ),
        ({"strategy": "megatron"}, QWEN | {"model_type": "llama", "mlp_bias": True}, r"biases=True, activation silu"),
        (
            {},
            QWEN | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 100},
            r"This qwen3_moe model has experts of 1024 x 100; their products take multiples of 8 only",
        ),
        ({"strategy": "megatron"}, QWEN | {"hidden_act": "gelu"}, r"activation gelu and rope type default: use"),
        ({"strategy": "megatron"}, QWEN | {"rope_scaling": {"type": "yarn"}}, r"rope type yarn: use"),
        ({"strategy": "megatron"}, QWEN | {"rope_parameters": {"rope_type": "dynamic"}}, r"rope type dynamic: use"),
        (
            {"use_remove_padding": True},
            QWEN | {"sliding_window": 4096, "use_sliding_window": True},
            r"use_remove_padding=True needs full attention in every layer, which this qwen3 model has not: set it to False",
        ),
        (
            {"use_remove_padding": True},
            QWEN | {"layer_types": ["sliding_attention", "full_attention"]},
            r"use_remove_padding=True needs full attention in every layer",
        ),
        (
            {"ulysses_sequence_parallel_size": 3},
            QWEN,
            r"ulysses_sequence_parallel_size=3 does not divide the model's attention heads \(16\)",
        ),
    ],
)
def test_models_that_ranks_cannot_share_are_refused_before_anything_starts(actor, model, message):
    with pytest.raises(ConfigError, match=message):
        check_model_layout(config(**actor), model)


@pytest.mark.parametrize(
    ("actor", "model"),
    [
        ({}, QWEN),
        ({}, QWEN | {"sliding_window": 4096}),
        ({"ulysses_sequence_parallel_size": 16}, QWEN),
        ({"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 8}}, QWEN),
        ({"strategy": "megatron"}, QWEN | {"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 1}),
        ({"strategy": "megatron"}, QWEN | {"rope_parameters": {"rope_type": "llama3"}, "rope_scaling": None}),
        ({"use_remove_padding": True}, QWEN),
        ({"use_remove_padding": True}, QWEN | {"sliding_window": 4096, "use_sliding_window": False}),
    ],
)
def test_models_that_the_backend_takes(actor, model):
    check_model_layout(config(**actor), model)


def test_a_resumed_run_may_have_another_backend_on_other_ranks():
    actor = "train_actor_rollout_ref.actor"
    before = {
        f"{actor}.strategy": "fsdp2",
        f"{actor}.megatron.tensor_model_parallel_size": 1,
        f"{actor}.optim.lr": 1e-6,
    }
    now = before | {f"{actor}.strategy": "megatron", f"{actor}.megatron.tensor_model_parallel_size": 2}
    check_resume(before, now)
    with pytest.raises(ConfigError, match=r"optim\.lr=0\.1 differs"):
        check_resume(before, now | {f"{actor}.optim.lr": 0.1})
