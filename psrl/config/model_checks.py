"""What is refused of the choice of a model, and of a tiny model's shape. Pure: files are looked at by psrl.models."""

from __future__ import annotations

from psrl.config.errors import ConfigError
from psrl.config.experts import EXPERTS_MULTIPLE
from psrl.config.schema import ModelConfig, TinyModelConfig

TINY, SMOLLM2, HF = "tiny", "smollm2_135m", "hf"
"""Values of model.name."""
EXPERTS_PER_TOKEN = 2
"""Of a tiny model with experts."""
AT_LEAST = {
    **{f"model.tiny.{key}": 1 for key in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")},
    "model.tiny.num_experts": 0,
    "model.tiny.max_position_embeddings": 1,
    "model.tiny.warm_start_steps": 0,
}  # fmt: skip
POSITIVE = ("model.tiny.warm_start_lr",)


def check_model_choice(model: ModelConfig) -> None:
    """Raises ConfigError with one sentence."""
    if model.path is not None:
        return
    if model.name == HF:
        raise ConfigError("model.name=hf needs model.path: the directory of a Hugging Face model.")
    if model.name not in (TINY, SMOLLM2):
        raise ConfigError(
            f"model.name={model.name} is unknown: allowed are {TINY}, {SMOLLM2}, or {HF} with model.path."
        )
    if model.name == TINY:
        check_tiny_shape(model.tiny)


def check_tiny_shape(tiny: TinyModelConfig) -> None:
    """Raises ConfigError for sizes of which no network can be made."""
    if tiny.hidden_size % (2 * tiny.num_heads):
        raise ConfigError(
            f"model.tiny.hidden_size={tiny.hidden_size} must be a multiple of 2 x model.tiny.num_heads={tiny.num_heads}."
        )
    if tiny.num_heads % tiny.num_kv_heads:
        raise ConfigError(
            f"model.tiny.num_heads={tiny.num_heads} must be a multiple of model.tiny.num_kv_heads={tiny.num_kv_heads}."
        )
    if tiny.num_experts != 0 and tiny.num_experts < EXPERTS_PER_TOKEN:
        raise ConfigError(
            f"model.tiny.num_experts={tiny.num_experts} must be 0, for a dense model, or at least {EXPERTS_PER_TOKEN}."
        )
    for name, size in (("hidden_size", tiny.hidden_size), ("intermediate_size", tiny.intermediate_size)):
        if tiny.num_experts and size % EXPERTS_MULTIPLE:
            raise ConfigError(
                f"model.tiny.{name}={size} must be a multiple of {EXPERTS_MULTIPLE} with model.tiny.num_experts."
            )
