"""A causal language model from a local Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from psrl.config.errors import ConfigError

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
