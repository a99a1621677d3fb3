"""Megatron-core's parameters and Hugging Face's, for Llama, Qwen2, Qwen3 (tied or untied) and Qwen3-MoE. Pure, both ways.

Megatron fuses q, k and v into one matrix whose rows go group by group (the queries of a key-value head, its key, its value),
and gate and up into another, gate first. Under tensor parallelism a rank holds whole groups, so each of its Hugging Face
parts is one contiguous block of rows, except where Megatron splits columns.

    split_local(rule, local)   one rank's Megatron tensor -> its blocks of the Hugging Face tensors
    join_local(rule, blocks)   the inverse
    block(tensor, dim, ...)    the block of a whole Hugging Face tensor that a rank needs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from psrl.trainer.backends.pipeline_parallel import StageLayers, stage_layers


class Kind(Enum):
    PLAIN = "plain"
    QKV = "qkv"
    GATE_UP = "gate_up"
    VOCABULARY = "vocabulary"
    """Rows of the vocabulary, padded with zeros to equally many on every rank."""
    EXPERTS = "experts"
    """Whole experts, dealt to expert- and tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that decide the mapping. `num_experts`: of every layer; 0 for a dense model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    num_experts: int = 0

    @property
    def queries_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face ones that it holds, in order. `dim`: the dimension of the latter that is
    cut over tensor-parallel ranks, None for one that every rank has whole."""

    megatron: str
    hugging_face: tuple[str, ...]
    dim: int | None
    kind: Kind = Kind.PLAIN


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def rules(shape: Sizes, stage: StageLayers | None = None) -> list[Rule]:
    """Every parameter of a stage (None: of the whole model) once, in the model's order. A tied output layer has none of its own,
    except where the embedding is on another stage: then it is a copy of that."""
    stage = stage or stage_layers(shape.num_layers, 0, 1)
    embedding = ("model.embed_tokens.weight",)
    found = [Rule(EMBEDDING, embedding, 0, Kind.VOCABULARY)] if stage.is_first else []
    for place, layer in enumerate(stage.layers):
        found += _layer_rules(shape, f"decoder.layers.{place}.", f"model.layers.{layer}.")
    if stage.is_last:
        found.append(Rule("decoder.final_layernorm.weight", ("model.norm.weight",), None))
        if not (shape.tied and stage.is_first):
            found.append(Rule(OUTPUT, embedding if shape.tied else ("lm_head.weight",), 0, Kind.VOCABULARY))
    return found


def _layer_rules(shape: Sizes, ours: str, theirs: str) -> list[Rule]:
    attention, mlp = f"{ours}self_attention.", f"{ours}mlp."
    projections = [f"{theirs}self_attn.{name}_proj." for name in "qkv"]
    found = [
        Rule(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",), None),
        Rule(f"{attention}linear_qkv.weight", tuple(f"{p}weight" for p in projections), 0, Kind.QKV),
    ]
    if shape.qkv_bias:
        found.append(Rule(f"{attention}linear_qkv.bias", tuple(f"{p}bias" for p in projections), 0, Kind.QKV))
    if shape.qk_norm:
        found += [Rule(f"{attention}{x}_layernorm.weight", (f"{theirs}self_attn.{x}_norm.weight",), None) for x in "qk"]
    return [
        *found,
        Rule(f"{attention}linear_proj.weight", (f"{theirs}self_attn.o_proj.weight",), 1),
        Rule(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",), None),
        *(_expert_rules(mlp, f"{theirs}mlp.") if shape.num_experts else _dense_rules(mlp, f"{theirs}mlp.")),
    ]


def _dense_rules(ours: str, theirs: str) -> list[Rule]:
    return [
        Rule(f"{ours}linear_fc1.weight", (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"), 0, Kind.GATE_UP),
        Rule(f"{ours}linear_fc2.weight", (f"{theirs}down_proj.weight",), 1),
    ]


def _expert_rules(ours: str, theirs: str) -> list[Rule]:
    """As transformers has them in memory: all experts of a layer in one tensor."""
    return [
        Rule(f"{ours}router", (f"{theirs}gate.weight",), None),
        Rule(f"{ours}gate_up", (f"{theirs}experts.gate_up_proj",), 0, Kind.EXPERTS),
        Rule(f"{ours}down", (f"{theirs}experts.down_proj",), 0, Kind.EXPERTS),
    ]


def block(tensor: torch.Tensor, dim: int | None, rank: int, size: int) -> torch.Tensor:
    """The part of a whole Hugging Face tensor that a rank of `size` holds: equal parts, rounded up, the last ones shorter.

    `[len(block(torch.arange(5), 0, r, 2)) for r in range(2)] == [3, 2]`.
    """
    if dim is None:
        return tensor
    length = tensor.shape[dim]
    each = -(-length // size)
    start = min(rank * each, length)
    return tensor.narrow(dim, start, min(each, length - start))


def padded_vocabulary(vocab_size: int, size: int) -> int:
    """The least multiple of `size` that holds the vocabulary: `padded_vocabulary(5, 2) == 6`."""
    return -(-vocab_size // size) * size


def split_local(rule: Rule, local: torch.Tensor, shape: Sizes, rank: int, size: int) -> list[torch.Tensor]:
    """One rank's Megatron tensor as its blocks of `rule.hugging_face`: views where rows are contiguous, else copies."""
    match rule.kind:
        case Kind.QKV:
            q, d = shape.queries_per_group, shape.head_dim
            groups = local.view(-1, (q + 2) * d, *local.shape[1:])
            parts = groups.split([q * d, d, d], dim=1)
            return [part.reshape(-1, *local.shape[1:]) for part in parts]
        case Kind.GATE_UP:
            return list(local.chunk(2))
        case Kind.VOCABULARY:
            start = rank * len(local)
            return [local[: max(0, min(len(local), shape.vocab_size - start))]]
        case Kind.PLAIN | Kind.EXPERTS:
            return [local]


def join_local(rule: Rule, blocks: Sequence[torch.Tensor], shape: Sizes, size: int) -> torch.Tensor:
    """The inverse of `split_local`: a rank's Megatron tensor from its blocks."""
    match rule.kind:
        case Kind.QKV:
            groups = len(blocks[1]) // shape.head_dim
            return torch.cat([b.reshape(groups, -1, *b.shape[1:]) for b in blocks], dim=1).flatten(0, 1)
        case Kind.GATE_UP:
            return torch.cat(list(blocks))
        case Kind.VOCABULARY:
            rows = padded_vocabulary(shape.vocab_size, size) // size
            missing = rows - len(blocks[0])
            return torch.cat([blocks[0], blocks[0].new_zeros(missing, *blocks[0].shape[1:])]) if missing else blocks[0]
        case Kind.PLAIN | Kind.EXPERTS:
            return blocks[0]
