"""Hugging Face tensors to Megatron's and back, bit for bit, for every family, tied and untied, and any tensor-parallel size."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from psrl.trainer.backends.hf_mapping import Kind, Sizes, block, join_local, padded_vocabulary, rules, split_local

pytestmark = pytest.mark.unit

VOCABULARY = 37  # padded for 2 and 4 ranks
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig, {}, {}),
    "qwen2": (Qwen2Config, {}, {"qkv_bias": True}),
    "qwen3": (Qwen3Config, {"head_dim": 6}, {"qk_norm": True, "head_dim": 6}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"head_dim": 6, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
        {"qk_norm": True, "head_dim": 6, "num_experts": 8},
    ),
}


def family(name: str, tied: bool) -> tuple[dict[str, torch.Tensor], Sizes]:
    config, extra, special = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES, **extra, tie_word_embeddings=tied))
    shape = Sizes(
        **{"num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "vocab_size": VOCABULARY, "tied": tied}
        | special
    )
    return {n: torch.randn_like(p) for n, p in model.named_parameters()}, shape


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_is_bit_equal(name, tied, size):
    source, shape = family(name, tied)
    found = rules(shape)
    assert sorted(n for rule in found for n in rule.hugging_face) == sorted(source)
    for rule in found:
        ranks = []
        for rank in range(size):
            blocks = [block(source[n], rule.dim, rank, size) for n in rule.hugging_face]
            local = join_local(rule, blocks, shape, size)
            back = split_local(rule, local, shape, rank, size)
            assert all(torch.equal(a, b) for a, b in zip(blocks, back, strict=True)), rule.megatron
            assert torch.equal(join_local(rule, back, shape, size), local)
            ranks.append(back)
        for position, n in enumerate(rule.hugging_face):
            parts = [blocks[position] for blocks in ranks]
            whole = parts[0] if rule.dim is None else torch.cat(parts, dim=rule.dim)
            assert torch.equal(whole, source[n]), n


def test_the_fused_rows_are_queries_key_value_of_each_group():
    shape = Sizes(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=1, vocab_size=8)
    rule = next(rule for rule in rules(shape) if rule.kind is Kind.QKV)
    q, k, v = torch.arange(4.0)[:, None], torch.arange(10.0, 12.0)[:, None], torch.arange(20.0, 22.0)[:, None]
    fused = join_local(rule, [q, k, v], shape, 1)
    assert fused.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_the_vocabulary_is_padded_to_equal_parts():
    assert [padded_vocabulary(n, 4) for n in (7, 8, 9)] == [8, 8, 12]
    shape = Sizes(num_layers=0, num_heads=1, num_kv_heads=1, head_dim=1, vocab_size=5, tied=True)
    (rule, _norm) = rules(shape)
    whole = torch.arange(1.0, 6.0)[:, None]
    last = join_local(rule, [block(whole, 0, 1, 2)], shape, 2)
    assert last.flatten().tolist() == [4, 5, 0]
