"""A causal language model from a local Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from psrl.config.errors import ConfigError
from psrl.rollout.engines.weight_set import weight_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_causal_lm(path: Path | str, dtype: str) -> PreTrainedModel:
    """The model in `dtype` (float32 | bfloat16) on the CPU, in evaluation mode, attention by SDPA. Never downloads.

    Raises ConfigError for another dtype and for a directory that transformers cannot load.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} is refused: allowed are {' and '.join(DTYPES)}.")
    try:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"The model in {path} cannot be loaded: {' '.join(str(error).split())[:300]}.") from error


def load_engine_model(path: Path | str, dtype: str) -> PreTrainedModel:
    """The same without gradients, for an engine."""
    return load_causal_lm(path, dtype).requires_grad_(False)


def checkpoint_specs(path: Path | str, dtype: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of each tensor that the model in `path` has in `dtype`, tied ones once; nothing is loaded.

    Raises ConfigError as `load_causal_lm` does.
    """
    model = architecture(path, dtype)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weight_tensors(model).items()}


def architecture(path: Path | str, dtype: str) -> PreTrainedModel:
    """The model of `path` in `dtype` without its weights, on the meta device. Raises ConfigError as `load_causal_lm` does."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} is refused: allowed are {' and '.join(DTYPES)}.")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(path, local_files_only=True), dtype=DTYPES[dtype]
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"The model in {path} cannot be built: {' '.join(str(error).split())[:300]}.") from error
