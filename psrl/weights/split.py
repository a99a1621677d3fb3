"""Which part of a published tensor each tensor-parallel rank of an engine needs. Pure, and the only place that knows.

The publisher lays its payload out by it, one contiguous section a rank and one for what all of them need: a reader then
fetches two runs of bytes from each trainer rank, however many tensors there are, columns included, and none twice. For an
engine of several pipeline stages both kinds are cut further, at the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

VOCABULARY_PADDING = 64
"""Engines pad the vocabulary to a multiple of this before they cut it."""

_ROWS = ("q_proj", "gate_proj", "up_proj")
_HEADS = ("k_proj", "v_proj")
_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) of dim 0 and columns [start, stop) of dim 1 (None: all). `padding`: rows of the engine's tensor
    behind it that nothing is published for."""

    rows: tuple[int, int]
    columns: tuple[int, int] | None = None
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """Tensor parallelism over `ways` engine ranks; `num_kv_heads` of the model decides whether keys and values are cut. With
    several pipeline `stages` each layer can be read alone."""

    ways: int = 1
    num_kv_heads: int = 1
    stages: int = 1

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[Block, ...]:
        """One block for each engine rank in order, or a single one of the whole tensor that every rank needs.

        Names are Hugging Face's of a dense decoder; any other tensor is needed whole. ValueError if a dimension cannot be
        divided. `Split(2).blocks("layers.0.mlp.down_proj.weight", (4, 6))` is columns 0-2 and 3-5.
        """
        module, kind = (["", *name.split(".")])[-2:]
        whole = (Block((0, shape[0] if shape else 1)),)
        if shape and module in _VOCABULARY:
            return self._vocabulary(shape[0])
        if self.ways == 1 or not shape:
            return whole
        if module in _COLUMNS and kind == "weight":
            return tuple(Block((0, shape[0]), part) for part in self._parts(name, shape[1]))
        if module in _ROWS or (module in _HEADS and self.num_kv_heads % self.ways == 0):
            return tuple(Block(part) for part in self._parts(name, shape[0]))
        return whole

    def unit(self, name: str) -> str:
        """What goes to a pipeline stage together: the layer of this tensor, or the tensor itself outside of layers; "" with
        one stage. How the layers are dealt is the engine's choice, and the first and the last stage may both have a tensor.

        >>> [Split(stages=2).unit(name) for name in ("model.layers.10.mlp.up_proj.weight", "lm_head.weight")]
        ['model.layers.10', 'lm_head.weight']
        """
        if self.stages == 1:
            return ""
        path = name.split(".")
        numbers = [place for place, step in enumerate(path) if step.isdecimal()]
        return ".".join(path[: numbers[0] + 1]) if numbers else name

    def _parts(self, name: str, length: int) -> list[tuple[int, int]]:
        if length % self.ways:
            raise ValueError(f"{name}: {length} rows or columns cannot be cut for {self.ways} tensor-parallel ranks")
        part = length // self.ways
        return [(rank * part, (rank + 1) * part) for rank in range(self.ways)]

    def _vocabulary(self, rows: int) -> tuple[Block, ...]:
        padded = -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
        part = -(-padded // self.ways)
        bounds = [min(rows, rank * part) for rank in range(self.ways + 1)]
        return tuple(Block((start, stop), padding=part - (stop - start)) for start, stop in pairwise(bounds))
