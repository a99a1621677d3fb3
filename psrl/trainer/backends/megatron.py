"""TrainBackend on Megatron-core: tensor, pipeline, context, expert and data parallelism, on CPU (gloo) or CUDA (nccl).

The layers come from Megatron, whose own data-parallel wrapper, distributed optimizer and pipeline need CUDA. Gradients are added
over the ranks that hold the same parameters here, and AdamW steps weights in the model's dtype, which the layers see in the
compute dtype. Everything that leaves the backend (published weights, checkpoints) has Hugging Face names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from psrl.config.schema import ActorConfig
from psrl.trainer.backends.base import LossFn, MicroBatch, WeightShard
from psrl.trainer.backends.core import (
    BackendCore,
    TokenOutputs,
    compute_dtype,
    ensure_process_group,
    grid_of,
    predictors_of,
    shared_mask,
)
from psrl.trainer.backends.hf_mapping import EMBEDDING, OUTPUT, Kind, Rule
from psrl.trainer.backends.megatron_layout import PREFIX, Layout, Place, init_layout
from psrl.trainer.backends.megatron_model import LocalWeights, build_gpt_model, local_weights, model_sizes
from psrl.trainer.backends.megatron_weights import OutsideWeights
from psrl.trainer.backends.owners import Owners, Replicas, Tied, deal
from psrl.trainer.backends.pipeline_parallel import (
    Link,
    Shape,
    StageLayers,
    forward_only,
    one_forward_one_backward,
    stage_layers,
)
from psrl.trainer.backends.ulysses import SharedRows
from psrl.trainer.backends.unpadded import ATTENTIONS, Ends, attention_of, has_kernel, without_padding
from psrl.trainer.backends.unpadded import KEY as UNPADDED_KEY
from psrl.trainer.backends.vocab_parallel import VocabularyPart, part_entropies, part_log_probs

KNOWN_IN_PARTS = ("q_layernorm.weight", "k_layernorm.weight", "mlp.router")


@dataclass(frozen=True, slots=True)
class Given:
    """What the layers are given: tokens [rows, length], their positions (None: 0, 1, 2, ...) and what attention has to know (None: it is
    causal). `places`: see Unpadded."""

    ids: torch.Tensor
    positions: torch.Tensor | None
    mask: torch.Tensor | Ends | None
    places: torch.Tensor | None = None


class MegatronBackend(BackendCore):
    """Policy model, optimizer and learning-rate schedule of one trainer rank.

    `model` must be the same on every rank; each keeps its part of it. ValueError, one sentence, for a model that is no Llama, Qwen2,
    Qwen3 or Qwen3-MoE, or that the ranks cannot share evenly. Not `trainable`: frozen, without an optimizer, for
    `log_probs` only. The model stays in eval mode. Rows may have no padding (`unpadded.py`), unless ranks share them.
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
        device, settings = torch.device(device), actor.megatron
        shape, dtype = model_sizes(model.config, settings), compute_dtype(actor.mixed_precision)
        ensure_process_group(device)
        layout = init_layout(settings, device)
        super().__init__(
            actor,
            temperature=temperature,
            total_steps=total_steps,
            device=device,
            dp_rank=layout.data.rank,
            dp_size=layout.data.size,
            dp_group=layout.data.group,
        )
        self.hidden_size = int(model.config.hidden_size)
        self.can_share_prompts = True
        self._shape, self._layout, self._tensor = shape, layout, layout.tensor
        self._stage = stage_layers(shape.num_layers, layout.pipeline.rank, layout.pipeline.size)
        self._link = Link(layout.pipeline.group, device, dtype) if layout.pipeline.size > 1 else None
        self._model = build_gpt_model(model, shape, self._stage, layout.dealt, dtype).to(device)
        self._rows = SharedRows(layout.context.group) if layout.context.size > 1 else None
        if actor.use_remove_padding and self._rows is not None:
            raise ValueError(
                f"{UNPADDED_KEY}=True cannot be had with {PREFIX}context_parallel_size={self._rows.size}: leave one out"
            )
        self._decide_padding(actor, unasked=self._rows is None and has_kernel(model.config, device, dtype))
        attention = None if self.pads else ATTENTIONS[attention_of(model.config, device, dtype)]
        for layer in self._model.decoder.layers:
            core = layer.self_attention.core_attention
            core.rows, core.unpadded = self._rows, attention
        if self._stage.is_last:
            self._model.output_layer.register_forward_pre_hook(self._keep_predictors)
        if actor.gradient_checkpointing:
            _checkpoint_activations(self._model.decoder.layers)
        self._seen = dict(self._model.named_parameters())
        """What the layers compute with."""
        self._sums: dict[str, torch.Tensor] = {}
        """Gradients of those that are stepped in another dtype."""
        self._dtype = model.dtype
        weights = local_weights(model, self._model, shape, self._stage, layout.dealt)
        rules = {name: rule for name, (rule, _) in weights.items()}
        self._owners = _owners(
            layout,
            self._seen,
            rules,
            _tied(layout, self._stage) if shape.tied else None,
            settings.use_distributed_optimizer,
        )
        self._take_weights(weights, trainable)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._outside = OutsideWeights(shapes, rules, shape, layout, self._owners)
        if trainable:
            self._make_optimizer(actor)
        else:
            self._model.requires_grad_(False)

    def _take_weights(self, weights: LocalWeights, trainable: bool) -> None:
        """Copy this rank's part of the source into the layers. Where they compute in another dtype than the source's, the optimizer
        has weights of its own in that one, and gradients of micro-batches are added in it."""
        for name, seen in self._seen.items():
            _, weight = weights[name]
            with torch.no_grad():
                seen.copy_(weight)
            other = trainable and seen.dtype != weight.dtype
            if other:
                seen.register_post_accumulate_grad_hook(partial(_add_gradient, self._sums, name, weight.dtype))
            if self._owners.owns(name):
                own = weight.to(self.device, copy=True).requires_grad_() if other else seen
                self._parameters[name] = own

    def weight_shards(self) -> Iterator[WeightShard]:
        """See TrainBackend. Collective."""
        return self._outside.shards(self._parameters)

    # ---- log-probs ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs_of(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """See TrainBackend. The stages work on different micro-batches at the same time; the last one tells the others."""
        if self._link is None:
            return super().log_probs_of(batches)

        def run(number: int, received: torch.Tensor | None) -> torch.Tensor:
            self._model.set_input_tensor(received)
            if self._stage.is_last:
                return self._token_outputs(batches[number])[0].contiguous()
            return self._hidden(batches[number])

        outputs = forward_only(self._link, self._hidden_shapes(batches), run)
        if not self._stage.is_last:
            outputs = [torch.empty(b.input_ids.shape, dtype=torch.float32, device=self.device) for b in batches]
        return [self._link.from_last(grid) for grid in outputs]

    def _token_outputs(self, batch: MicroBatch, entropy: bool = False) -> TokenOutputs:
        """The model runs on all tokens, its output layer only on the positions that predict a trainable token."""
        length = batch.input_ids.shape[1]
        batch = batch if self._rows is None else self._rows.enter(batch)
        targets = batch.loss_mask.flatten().nonzero().squeeze(-1)
        places = predictors_of(batch, targets)
        if self._rows is not None:
            inside, places = self._rows.mine(places, batch.input_ids.shape[1])
            targets = targets[inside]
        given = self._given(batch)
        places = places if given.places is None else given.places[places]
        rows, width = given.ids.shape
        self._predictors = places % width * rows + places // width  # Megatron's order is [length, rows]
        logits = self._run(given)[0]
        start = self._tensor.rank * logits.shape[-1]
        part = VocabularyPart(start, self._tensor.group) if self._tensor.size > 1 else None
        logits = logits[:, : max(0, self._shape.vocab_size - start)]  # without the padding of the vocabulary

        def grid(values: torch.Tensor) -> torch.Tensor:
            whole = grid_of(values, targets, batch.input_ids.shape)
            return whole if self._rows is None else self._rows.leave(whole, length)

        tokens = batch.input_ids.flatten()[targets]
        log_probs = part_log_probs(logits, tokens, self.temperature, part, fused=self._compiled)
        return grid(log_probs), grid(part_entropies(logits, self.temperature, part)) if entropy else None

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        """[length, rows, hidden] behind a stage that is not the last."""
        return self._run(self._given(batch if self._rows is None else self._rows.enter(batch)))

    def _given(self, batch: MicroBatch) -> Given:
        """Of a batch that has entered."""
        if not self.pads:
            row = without_padding(batch)
            return Given(row.input_ids, row.positions, row.ends, row.places)
        ids, positions = batch.input_ids, batch.layout.positions if batch.layout else None
        if self._rows is not None:
            ids, positions = self._rows.part(batch)
        return Given(ids, positions, shared_mask(batch.layout))

    def _run(self, given: Given) -> torch.Tensor:
        """What this rank's stage makes of its part of the rows."""
        self._model.rotary_pos_emb.positions = given.positions
        try:
            result: torch.Tensor = self._model(given.ids, None, given.mask)
            return result
        finally:
            self._predictors = self._model.rotary_pos_emb.positions = None
            self._model.set_input_tensor(None)

    def _hidden_shapes(self, batches: Sequence[MicroBatch]) -> list[Shape]:
        """Of what goes from stage to stage."""
        if not self.pads:
            tokens: list[int] = (
                torch.stack([batch.attention_mask.sum() for batch in batches]).tolist() if batches else []
            )
            return [(number, 1, self.hidden_size) for number in tokens]
        sharing = self._layout.context.size
        return [(-(-b.input_ids.shape[1] // sharing), b.input_ids.shape[0], self.hidden_size) for b in batches]

    def _keep_predictors(self, _module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Before the output layer: [length, rows, hidden] -> [n, 1, hidden] at the places that predict the n targets."""
        assert self._predictors is not None
        return (args[0].flatten(0, 1).index_select(0, self._predictors)[:, None], *args[1:])

    # ---- gradients ---------------------------------------------------------------------------------------------

    def accumulate(self, batches: Sequence[MicroBatch], loss_fn: LossFn) -> None:
        """See TrainBackend. Only the last stage has losses and their metrics."""
        if self._link is None:
            return super().accumulate(batches, loss_fn)

        def run(number: int, received: torch.Tensor | None) -> torch.Tensor:
            self._model.set_input_tensor(received)
            if self._stage.is_last:
                return self._loss(batches[number], loss_fn)
            self._parts.append({})
            return self._hidden(batches[number])

        return one_forward_one_backward(self._link, self._hidden_shapes(batches), run)

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _reduce(self, parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        metrics = super()._reduce(parts) if self._stage.is_last else {}
        return metrics if self._link is None else self._link.metrics_from_last(metrics)

    def _gradient(self, name: str) -> torch.Tensor | None:
        return self._sums.get(name, self._seen[name].grad)

    def _gradients(self) -> Iterator[torch.Tensor]:
        return (gradient for name in self._seen if (gradient := self._gradient(name)) is not None)

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._sums.clear()
        for seen in self._seen.values():
            seen.grad = None

    def _clip_gradients(self) -> float:
        """Gradients are added where they are stepped. Of q and k norms and routers each tensor-parallel rank knows only what its own
        heads and experts say: these are added over those ranks too. A tensor that several ranks have whole counts once in the norm."""
        cut, whole, experts = squares = torch.zeros(3, dtype=torch.float64, device=self.device)
        for name in self._seen:
            gradient = self._gradient(name)
            assert gradient is not None
            if name.endswith(KNOWN_IN_PARTS) and self._tensor.size > 1:
                dist.all_reduce(gradient, group=self._tensor.group)
            self._owners.add_gradients(name, gradient)
            if name in self._parameters:
                self._parameters[name].grad = gradient
                kind = experts if name in self._owners.experts else whole if self._outside.is_whole(name) else cut
                kind += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        if self._tensor.size > 1:
            for parts in (cut, experts):
                dist.all_reduce(parts, group=self._tensor.group)
        if self._owners.replicas.owners is not None:
            dist.all_reduce(squares[:2], group=self._owners.replicas.group)
        if self._owners.expert_replicas is not None:
            stepped_once = self._owners.expert_replicas.owners is not None
            dist.all_reduce(
                experts, group=(self._layout.replicas if stepped_once else self._layout.dealt.exchange).group
            )
        if self._link is not None:
            dist.all_reduce(squares, group=self._link.group)
        norm = squares.sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._grad_clip, norm.float())
        return float(norm)

    @torch.no_grad()
    def _weights_changed(self) -> None:
        """From those that step them to all that see them. Collective."""
        for name, seen in self._seen.items():
            own = self._parameters.get(name)
            if own is not None and own is not seen:
                seen.copy_(own)
            self._owners.spread_weight(name, seen)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def checkpoint_bytes(self) -> int:
        return 3 * self._outside.num_parameters() * self._dtype.itemsize

    def _tensors(self, kind: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._outside.tensors(kind, values)

    def _restore(self, kind: str, state: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        self._outside.restore(kind, state, values)


def _owners(
    layout: Layout, seen: Mapping[str, torch.Tensor], rules: Mapping[str, Rule], tied: Tied | None, distributed: bool
) -> Owners:
    experts = frozenset(name for name, rule in rules.items() if rule.kind is Kind.EXPERTS)
    copied = tied.name if tied is not None and tied.is_copy else None
    others = {name: weight.numel() for name, weight in seen.items() if name != copied and name not in experts}
    if distributed and layout.replicas.size > len(others):
        raise ValueError(
            f"{PREFIX}use_distributed_optimizer=True deals {len(others)} parameters to {layout.replicas.size} ranks: set it to False for "
            "so small a model"
        )
    replicas = _replicas(layout.replicas, others, distributed)
    if not experts:
        return Owners(replicas, tied)
    # Two tensors a layer, so there may be fewer than ranks: a rank without any has others to step.
    sizes = {name: weight.numel() for name, weight in seen.items() if name in experts}
    return Owners(replicas, tied, _replicas(layout.expert_replicas, sizes, distributed), experts)


def _replicas(place: Place, sizes: Mapping[str, int], distributed: bool) -> Replicas:
    if not distributed or place.size == 1:
        return Replicas(place.group, place.rank, place.size, None)
    return Replicas(place.group, place.rank, place.size, deal(sizes, place.size))


def _tied(layout: Layout, stage: StageLayers) -> Tied | None:
    """Of a model whose output layer is its embedding; None unless they are on two stages, of which this is one."""
    if stage.size == 1 or layout.embedding is None or not (stage.is_first or stage.is_last):
        return None
    return Tied(layout.embedding, EMBEDDING if stage.is_first else OUTPUT, is_copy=stage.is_last)


def _add_gradient(sums: dict[str, torch.Tensor], name: str, dtype: torch.dtype, seen: torch.Tensor) -> None:
    """Add the gradient of the layers' copy to the sum in the optimizer's dtype."""
    assert seen.grad is not None
    if name in sums:
        sums[name] += seen.grad
    else:
        sums[name] = seen.grad.to(dtype)
    seen.grad = None


def _checkpoint_activations(layers: torch.nn.ModuleList) -> None:
    """Keep only each layer's input for the backward pass, which runs the layer again."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
