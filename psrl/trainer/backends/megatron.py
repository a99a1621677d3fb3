"""TrainBackend on Megatron-core: tensor parallelism inside, data parallelism around it, on CPU (gloo) or CUDA (nccl).

Megatron's own data-parallel wrapper and distributed optimizer need CUDA. The layers come from Megatron; gradients are added
over data-parallel ranks here, and AdamW steps float32 weights, which the layers see in the compute dtype. Everything that
leaves the backend (published weights, checkpoints) has Hugging Face names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from psrl.config.schema import ActorConfig
from psrl.trainer.backends.base import MicroBatch, WeightShard
from psrl.trainer.backends.core import (
    BackendCore,
    TokenOutputs,
    compute_dtype,
    ensure_process_group,
    grid_of,
    predictors_of,
    row_range,
    shared_mask,
)
from psrl.trainer.backends.hf_mapping import Kind, Rule, join_local, split_local
from psrl.trainer.backends.megatron_model import (
    SIZE_KEY,
    build_gpt_model,
    dense_shape,
    init_model_parallel,
    local_weights,
    parallel_state,
)
from psrl.trainer.backends.vocab_parallel import VocabularyPart, part_entropies, part_log_probs


class MegatronBackend(BackendCore):
    """Policy model, optimizer and learning-rate schedule of one trainer rank.

    `model` must be the same on every rank; each keeps its tensor-parallel part of it. ValueError, one sentence, for a model
    that is no dense Llama, Qwen2 or Qwen3, or that the ranks cannot share evenly. Not `trainable`: frozen, without an optimizer,
    for `log_probs` only. The model stays in eval mode.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        actor: ActorConfig,
        *,
        temperature: float,
        total_steps: int | None = None,
        trainable: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        size = actor.megatron.tensor_model_parallel_size
        shape = dense_shape(model.config, size)
        dtype = compute_dtype(actor.mixed_precision)
        ensure_process_group(device)
        if dist.get_world_size() % size:
            raise ValueError(f"{SIZE_KEY}={size} does not divide the {dist.get_world_size()} trainer ranks")
        init_model_parallel(size)
        super().__init__(
            actor,
            temperature=temperature,
            total_steps=total_steps,
            device=device,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            dp_group=parallel_state.get_data_parallel_group(),
        )
        self.hidden_size = int(model.config.hidden_size)
        self.can_share_prompts = True
        self._shape, self._tp_size = shape, size
        self._tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._mesh: DeviceMesh | None = None
        if self.world_size > 1:
            self._mesh = init_device_mesh(device.type, (self.dp_size, size), mesh_dim_names=("dp", "tp"))
        self._model = build_gpt_model(model, shape, size, dtype).to(device)
        self._model.output_layer.register_forward_pre_hook(self._keep_predictors)
        if actor.gradient_checkpointing:
            _checkpoint_activations(self._model.decoder.layers)
        self._rules: dict[str, Rule] = {}
        self._take_weights(model)
        if trainable:
            self._own_weights(model)
            self._make_optimizer(actor)
        else:
            self._model.requires_grad_(False)

    def weight_shards(self) -> Iterator[WeightShard]:
        """See TrainBackend. Collective. What several ranks hold alike is published once, each a part of the rows."""
        for name, parameter in self._parameters.items():
            rule = self._rules[name]
            for hf, part in zip(rule.hugging_face, self._split(rule, parameter.detach()), strict=True):
                full = self._full_shape(rule, part)
                start, rows, holders, holder = self._rows(rule, part)
                first, end = row_range(len(rows), holder, holders)
                yield WeightShard(name=hf, full_shape=full, row_start=start + first, local=rows[first:end])

    def _rows(self, rule: Rule, part: torch.Tensor) -> tuple[int, torch.Tensor, int, int]:
        """(first row, rows, ranks that have them, place among these). Columns are exchanged for rows, not gathered."""
        if rule.dim is None:
            return 0, part, self.world_size, self.rank
        if rule.dim == 1:
            part = self._columns_to_rows(part)
        return self._tp_rank * self._most_rows(rule, part), part, self.dp_size, self.dp_rank

    def _most_rows(self, rule: Rule, part: torch.Tensor) -> int:
        """Rows of every rank but the last of the vocabulary's."""
        return -(-self._shape.vocab_size // self._tp_size) if rule.kind is Kind.VOCABULARY else len(part)

    def _columns_to_rows(self, part: torch.Tensor) -> torch.Tensor:
        """[rows, columns / n] of each of n ranks -> [rows / n, columns]."""
        if self._tp_size == 1:
            return part
        received = torch.empty_like(part, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, part.contiguous(), group=self._tp_group)
        return received.view(self._tp_size, -1, part.shape[1]).transpose(0, 1).flatten(1)

    # ---- log-probs ---------------------------------------------------------------------------------------------

    def _token_outputs(self, batch: MicroBatch, entropy: bool = False) -> TokenOutputs:
        """The model runs on all tokens, its output layer only on the positions that predict a trainable token."""
        targets = batch.loss_mask.flatten().nonzero().squeeze(-1)
        places, rows = predictors_of(batch, targets), len(batch.input_ids)
        length = batch.input_ids.shape[1]
        self._predictors = places % length * rows + places // length  # Megatron's order is [length, rows]
        self._model.rotary_pos_emb.positions = batch.layout.positions if batch.layout else None
        try:
            logits = self._model(batch.input_ids, None, shared_mask(batch.layout))[0]
        finally:
            self._predictors = self._model.rotary_pos_emb.positions = None
        start = self._tp_rank * logits.shape[-1]
        part = VocabularyPart(start, self._tp_group) if self._tp_size > 1 else None
        logits = logits[:, : max(0, self._shape.vocab_size - start)]  # without the padding of the vocabulary

        def grid(values: torch.Tensor) -> torch.Tensor:
            return grid_of(values, targets, batch.input_ids.shape)

        log_probs = part_log_probs(
            logits, batch.input_ids.flatten()[targets], self.temperature, part, fused=self._fused
        )
        return grid(log_probs), grid(part_entropies(logits, self.temperature, part)) if entropy else None

    def _keep_predictors(self, _module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Before the output layer: [length, rows, hidden] -> [n, 1, hidden] at the places that predict the n targets."""
        assert self._predictors is not None
        return (args[0].flatten(0, 1).index_select(0, self._predictors)[:, None], *args[1:])

    # ---- gradients ---------------------------------------------------------------------------------------------

    def _take_weights(self, source: PreTrainedModel) -> None:
        """Copy this rank's part of the source into the layers."""
        weights = local_weights(source, self._model, self._shape, self._tp_rank, self._tp_size)
        for name, seen in self._model.named_parameters():
            self._rules[name], weight = weights[name]
            self._parameters[name] = seen
            with torch.no_grad():
                seen.copy_(weight)

    def _own_weights(self, source: PreTrainedModel) -> None:
        """Where the layers compute in another dtype than the source's, the optimizer has weights of its own in that one, and
        gradients of micro-batches are added in it."""
        weights = local_weights(source, self._model, self._shape, self._tp_rank, self._tp_size)
        for name, seen in self._model.named_parameters():
            _, weight = weights[name]
            if seen.dtype != weight.dtype:
                self._parameters[name] = own = weight.detach().clone().to(self.device).requires_grad_()
                seen.register_post_accumulate_grad_hook(partial(_move_gradient, own))

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _clip_gradients(self) -> float:
        """Heads of one rank only give each q and k norm its gradient there: these are added over tensor-parallel ranks,
        all others over data-parallel ones. A tensor that every rank has whole counts once in the norm."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            assert gradient is not None
            if name.endswith(("q_layernorm.weight", "k_layernorm.weight")) and self._tp_size > 1:
                dist.all_reduce(gradient, group=self._tp_group)
            if self.dp_size > 1:
                dist.all_reduce(gradient, group=self._dp_group)
            squares[int(self._rules[name].dim is None)] += gradient.double().square().sum()
        if self._tp_size > 1:
            dist.all_reduce(squares[:1], group=self._tp_group)
        norm = squares.sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._grad_clip, norm.float())
        return float(norm)

    def _weights_changed(self) -> None:
        for name, seen in self._model.named_parameters():
            if seen is not self._parameters[name]:
                with torch.no_grad():
                    seen.copy_(self._parameters[name])

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def _tensors(self, kind: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            f"{kind}.{hf}": self._distributed(rule, part)
            for name, rule in self._rules.items()
            for hf, part in zip(rule.hugging_face, self._split(rule, values[name].detach()), strict=True)
        }

    def _restore(self, kind: str, state: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        for name, rule in self._rules.items():
            parts = [state[f"{kind}.{hf}"] for hf in rule.hugging_face]
            local = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
            values[name].copy_(join_local(rule, local, self._shape, self._tp_size))

    def _split(self, rule: Rule, local: torch.Tensor) -> list[torch.Tensor]:
        return split_local(rule, local, self._shape, self._tp_rank, self._tp_size)

    def _full_shape(self, rule: Rule, part: torch.Tensor) -> tuple[int, ...]:
        if rule.kind is Kind.VOCABULARY:
            return (self._shape.vocab_size, *part.shape[1:])
        return tuple(n * self._tp_size if i == rule.dim else n for i, n in enumerate(part.shape))

    def _distributed(self, rule: Rule, part: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return part
        full = torch.Size(self._full_shape(rule, part))
        stride = torch.empty(full, device="meta").stride()
        placements = [Replicate(), Replicate() if rule.dim is None else Shard(rule.dim)]
        return DTensor.from_local(part.contiguous(), self._mesh, placements, run_check=False, shape=full, stride=stride)


def _move_gradient(own: torch.Tensor, seen: torch.Tensor) -> None:
    """Add the gradient of the layers' copy to that of the optimizer's weight."""
    assert seen.grad is not None
    if own.grad is None:
        own.grad = seen.grad.to(own.dtype)
    else:
        own.grad += seen.grad
    seen.grad = None


def _checkpoint_activations(layers: torch.nn.ModuleList) -> None:
    """Keep only each layer's input for the backward pass, which runs the layer again."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
