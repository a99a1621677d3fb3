"""A Megatron-core GPT model from a Hugging Face one: its configuration, its layer spec, and the parts of our own.

Megatron's attention and rotary embedding expect CUDA and rows that start at position 0. Ours run wherever PyTorch runs, and
take positions and masks from the micro-batch, so that several responses may stand behind one prompt. Experts: `experts.py`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

with warnings.catch_warnings():  # without Apex and TransformerEngine it says so at length, and works
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import ModuleSpec, TransformerConfig

from psrl.config.experts import num_experts
from psrl.config.megatron import MegatronConfig
from psrl.config.megatron_models import check_megatron_model
from psrl.trainer.backends.experts import ExpertLayer, Routing
from psrl.trainer.backends.hf_mapping import Kind, Rule, Sizes, block, join_local, padded_vocabulary, rules
from psrl.trainer.backends.megatron_layout import Dealt
from psrl.trainer.backends.pipeline_parallel import StageLayers
from psrl.trainer.backends.ulysses import SharedRows
from psrl.trainer.backends.unpadded import Attention, Ends

LocalWeights = dict[str, tuple[Rule, torch.Tensor]]


def model_sizes(config: PretrainedConfig, settings: MegatronConfig) -> Sizes:
    """The sizes of a Hugging Face model; ConfigError for one that ranks cannot share as `settings` say."""
    model = config.to_dict()
    check_megatron_model(model, settings)
    return Sizes(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type in ("qwen3", "qwen3_moe"),
        tied=bool(config.tie_word_embeddings),
        num_experts=num_experts(model),
    )


def build_gpt_model(
    source: PreTrainedModel, shape: Sizes, stage: StageLayers, dealt: Dealt, dtype: torch.dtype
) -> GPTModel:
    """An uninitialised stage of this rank's part of a model; `local_weights` fill it. Needs Megatron's process groups.
    To Megatron it is a model of its own with fewer layers, so that any number of layers may be dealt to the stages."""
    config, size = source.config, dealt.tensor.size
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SDPAttention
    if shape.num_experts:
        routing = Routing(
            config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob)
        )
        spec.submodules.mlp = ModuleSpec(ExpertLayer, params={"routing": routing, "dealt": dealt})
    with warnings.catch_warnings(), _no_notice_of_our_layers():
        warnings.simplefilter("ignore")  # of what is deprecated in Megatron's own calls
        model = GPTModel(
            _transformer_config(config, shape, len(stage.layers), size, dtype),
            spec,
            pre_process=stage.is_first,
            post_process=stage.is_last,
            vocab_size=padded_vocabulary(shape.vocab_size, size),
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
        )
    model = model.to(dtype).eval()  # Megatron makes norms in float32
    model.rotary_pos_emb = Rotary(source.get_decoder().rotary_emb.inv_freq.detach().float().clone())
    return model


def local_weights(
    source: PreTrainedModel, model: GPTModel, shape: Sizes, stage: StageLayers, dealt: Dealt
) -> LocalWeights:
    """This rank's part of `source` for each parameter of its stage `model`, with its rule, in the model's order. Tensors may be
    views of the source's. ValueError if the two models have different tensors."""
    theirs = dict(source.named_parameters())
    ours = [name for name, _ in model.named_parameters()]
    found = {rule.megatron: rule for rule in rules(shape, stage)}
    covered = {name for rule in rules(shape) for name in rule.hugging_face}
    if found.keys() != set(ours) or covered != theirs.keys():
        different = sorted((found.keys() ^ set(ours)) | (covered ^ theirs.keys()))
        raise ValueError(f"{type(source).__name__} has tensors that the megatron backend does not map: {different[:3]}")

    def part(rule: Rule) -> torch.Tensor:
        place = dealt if rule.kind is Kind.EXPERTS else dealt.tensor
        blocks = [block(theirs[name].detach(), rule.dim, place.rank, place.size) for name in rule.hugging_face]
        return join_local(rule, blocks, shape, dealt.tensor.size)

    return {name: (found[name], part(found[name])) for name in ours}


@contextmanager
def _no_notice_of_our_layers() -> Iterator[None]:
    """Megatron warns of each feed-forward layer that is none of its own, and takes it as it should."""
    log = logging.getLogger("megatron.core.transformer.transformer_layer")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _transformer_config(
    config: PretrainedConfig, shape: Sizes, num_layers: int, size: int, dtype: torch.dtype
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=size,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


class Rotary(torch.nn.Module):
    """Angles of a micro-batch: positions 0, 1, 2, ... of every row, or `positions` [rows, length] where they are set."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.positions: torch.Tensor | None = None

    def get_rotary_seq_len(self, _context: Any, transformer: Any, hidden: torch.Tensor | None, *_: Any) -> int:
        """Megatron asks for the length first: hidden states are [length, rows, hidden], those of another stage are put down at
        the transformer."""
        return (transformer.input_tensor if hidden is None else hidden).size(0)

    def forward(self, length: int, **_: Any) -> torch.Tensor:
        """float32 [length, 1 or rows, 1, head_dim]."""
        frequencies: torch.Tensor = self.frequencies  # type: ignore[assignment]
        positions = self.positions
        if positions is None:
            positions = torch.arange(length, device=frequencies.device)[None]
        angles = positions.t()[..., None].float() * frequencies
        return torch.cat([angles, angles], dim=-1)[:, :, None]


class SDPAttention(torch.nn.Module):
    """PyTorch's attention kernel in Megatron's layout: causal, or with a mask bool [rows, 1, length, length], or over a row without
    padding, whose sequences' ends then travel in the mask's place. `rows`: set where ranks share rows, which attention needs
    whole; `unpadded`: where rows have no padding."""

    def __init__(self, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.rows: SharedRows | None = None
        self.unpadded: Attention | None = None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | Ends | None, **_: Any
    ) -> torch.Tensor:
        """query [length, rows, heads, d], key and value with fewer heads -> [length, rows, heads x d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if isinstance(mask, Ends):
            assert self.unpadded is not None
            return self.unpadded(q, k, v, mask, self.scale).transpose(0, 1).flatten(2)
        if self.rows is not None:
            return self.rows.attention(q, k, v, mask, self.scale).transpose(0, 1).flatten(2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)
