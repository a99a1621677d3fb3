"""What the trainer benchmarks share: Qwen3-shaped models, what a step of one takes, what the GPU reaches."""

from __future__ import annotations

import gc
import time

import torch
from transformers import PretrainedConfig, Qwen3Config

DATASHEET_FLOPS = 989e12
"""Dense bfloat16 of an H100 or H200."""
SIZES = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    },
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}  # fmt: skip
"""By name; `tiny` is for a look on a CPU."""
VOCABULARY = 151936
GIB = 2**30


def shape(size: str) -> PretrainedConfig:
    usual = {"vocab_size": VOCABULARY, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    return Qwen3Config(max_position_embeddings=40960, **(usual | SIZES[size]))


def step_flops(config: PretrainedConfig, rows: int, length: int) -> float:
    """Forward and backward of one micro-batch: 6 for each weight of a matrix product and token, and causal attention."""
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv) + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * 2 * 2 * heads * length / 2  # scores and values, half of the square
    return rows * length * (6.0 * weights + 3.0 * attention)


def matrix_rate() -> float:
    """What the GPU reaches in a large bfloat16 product of random matrices, operations a second."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(50):
        a @ b
    torch.cuda.synchronize()
    return 50 * 2 * 8192**3 / (time.perf_counter() - begun)


def clean() -> None:
    """Give back the memory of backends that are gone."""
    gc.collect()
    torch.cuda.empty_cache()
