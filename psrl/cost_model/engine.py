"""The engine to be measured: the embedded one, with the tiny model or a model directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from psrl.config.errors import ConfigError
from psrl.config.model_checks import TINY
from psrl.config.schema import TinyModelConfig
from psrl.cost_model.measure import GridPoint, most_new_tokens
from psrl.models.resolve import describe_model

if TYPE_CHECKING:
    from psrl.rollout.engines.base import Engine

TINY_VOCABULARY = 512


def make_engine(model: str, dtype: str, threads: int, points: Sequence[GridPoint], steps: int) -> Engine:
    """An engine with room for every grid point. `model` is "tiny" (random weights: its steps cost the same) or a directory.

    Raises ConfigError for a model that is not there or whose context is too short.
    """
    context = max(p.tokens_per_seq + most_new_tokens(p, steps) for p in points)
    source = None if model == TINY else describe_model(Path(model).expanduser().absolute())
    if source is not None and source.context is not None and context > source.context:
        raise ConfigError(
            f"The model in {model} reads at most {source.context} tokens, but the grid needs {context}: lower --tokens-per-seq."
        )
    import torch

    from psrl.models.load import load_engine_model
    from psrl.models.tiny import random_tiny
    from psrl.rollout.engines.torch_engine import TorchEngine

    torch.set_num_threads(threads)
    if source is None:
        network = random_tiny(TinyModelConfig(), TINY_VOCABULARY, context).eval()
    else:
        network = load_engine_model(source.path, dtype)
    num_seqs = max(p.num_seqs for p in points)
    return TorchEngine(
        network,
        eos_token_ids=(),
        max_num_seqs=num_seqs,
        max_model_len=context,
        kv_cache_tokens=num_seqs * context,
        enable_prefix_caching=False,  # what is measured is work, not what was done before
    )
