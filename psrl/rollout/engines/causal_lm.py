"""Any transformers causal LM as three calls over the rows of a KV cache: prefill sequences, or what they have more than before,
and decode one token each."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from psrl.rollout.engines.kv_cache import SlotCache
from psrl.rollout.engines.prefix_cache import BlockRun

_ATTENTION_KINDS = ("full_attention", "sliding_attention")


def check_supported(model: PreTrainedModel) -> None:
    """Refuse what this engine would decode wrongly. Raises ValueError naming the model class and the reason."""
    config = model.config
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    missing = [p for p in ("attention_mask", "position_ids", "logits_to_keep") if p not in parameters]
    if missing:
        raise ValueError(f"{name} cannot be decoded here: its forward does not take {', '.join(missing)}")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{name} uses attention {config._attn_implementation!r}; load it with attn_implementation 'sdpa' or 'eager'"
        )
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(_ATTENTION_KINDS))
    if kinds:
        raise ValueError(f"{name} has layers of kind {', '.join(kinds)}; known are {', '.join(_ATTENTION_KINDS)}")
    # These change their frequencies with the longest sequence of the batch: a sample would depend on its neighbours.
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_kind = [r for r in rope.values() if isinstance(r, dict)] or [rope]
    if any(r.get("rope_type") in ("dynamic", "longrope") for r in per_layer_kind):
        raise ValueError(f"{name} has a rope_type (dynamic, longrope) that depends on the batch; use a static one")


class CachedCausalLM:
    """`model` with one KV row per running sequence. Call within torch.inference_mode()."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int,
        max_length: int,
        device: torch.device | str,
        block_size: int = 0,
    ) -> None:
        """`block_size`: tokens of a block that can be stored and restored; 0 if none ever is."""
        check_supported(model)
        self._model = model
        self._device = torch.device(device)
        config = model.config
        embedding: Any = model.get_input_embeddings()
        self.vocab_size = int(embedding.weight.shape[0])
        self._mask_dtype = model.dtype
        self._min_score = torch.finfo(model.dtype).min
        self._columns = torch.arange(max_length, device=self._device)
        self._cache_key = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        self._window: int | None = window if "sliding_attention" in kinds or not kinds else None
        self._mixed_kinds = kinds == set(_ATTENTION_KINDS)
        self._cache = SlotCache(
            num_layers=config.num_hidden_layers,
            max_rows=max_rows,
            max_length=max_length,
            block_size=block_size,
            device=self._device,
        )

    def prefill(self, rows: Sequence[int], sequences: Sequence[Sequence[int]]) -> None:
        """Fill the KV of `sequences[i]` (token ids, at least one) into row `rows[i]`.

        Padding stands to the right, where no real token attends to it; its keys lie behind the row's end, masked until
        real tokens overwrite them.
        """
        width = max(map(len, sequences))
        ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences], device=self._device)
        positions = self._columns[:width].expand(len(rows), width)
        self._cache.begin_prefill(rows, width)
        self._forward(ids, positions, None)

    def extend(self, rows: Sequence[int], starts: Sequence[int], tails: Sequence[Sequence[int]]) -> None:
        """Fill the KV of `tails[i]` (token ids, at least one) into row `rows[i]`, which has that of the `starts[i]` tokens
        before them. Padding as in `prefill`; its keys are not kept."""
        width = max(map(len, tails))
        ids = torch.tensor([[*t, *[0] * (width - len(t))] for t in tails], device=self._device)
        self._cache.begin_extend(rows, starts, [len(t) for t in tails])
        length = max(start + len(tail) for start, tail in zip(starts, tails, strict=True))
        at = torch.tensor(starts, device=self._device).unsqueeze(1) + self._columns[:width]
        at = at.clamp_(max=length - 1)  # padding: any position that the model knows
        self._forward(ids, at, self._mask(at, length))

    def decode(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Feed `token_ids[i]` at `positions[i]` of row i, for all rows 0 .. n-1. Returns logits [n, vocab]."""
        length = max(positions) + 1
        ids = torch.tensor(token_ids, device=self._device).unsqueeze(1)
        at = torch.tensor(positions, device=self._device)
        self._cache.begin_decode(at, length)
        at = at.unsqueeze(1)
        return self._forward(ids, at, self._mask(at, length)).logits[:, -1]

    def release(self) -> None:
        """Give the memory of all rows and stored blocks back."""
        self._cache.release()

    def copy_rows(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        self._cache.copy_rows(moves, length)

    def store_blocks(self, runs: Sequence[BlockRun]) -> None:
        self._cache.store_blocks(runs)

    def restore_blocks(self, runs: Sequence[BlockRun]) -> None:
        self._cache.restore_blocks(runs)

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive mask [n, 1, q, length] of queries at `positions` [n, q]; one per kind of attention layer where the model
        mixes them."""
        positions = positions.unsqueeze(2)
        columns = self._columns[:length]
        hidden = columns > positions
        if self._window is None:
            return self._additive(hidden)
        sliding = self._additive(hidden | (columns <= positions - self._window))
        if not self._mixed_kinds:
            return sliding
        return {"full_attention": self._additive(hidden), "sliding_attention": sliding}

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._mask_dtype, device=self._device)
        return mask.masked_fill_(hidden, self._min_score).unsqueeze(1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: Any) -> Any:
        return self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_key: self._cache},
        )
