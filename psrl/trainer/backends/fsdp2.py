"""TrainBackend on PyTorch FSDP2 (`fully_shard`) for any Hugging Face causal model, on CPU (gloo) or CUDA (nccl).

Rows are right-padded, so a causal model needs no padding mask: no real token ever looks at padding. It may be left out
altogether (`unpadded.py`). Weights are sharded over all ranks or, with replicas (HSDP), over groups of them; ranks may share
rows too (`ulysses.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from psrl.algorithms.token_entropy import token_entropies
from psrl.algorithms.token_log_probs import token_log_probs
from psrl.config.backend_checks import has_full_attention
from psrl.config.schema import ActorConfig
from psrl.trainer.backends.base import MicroBatch, SharedLayout, WeightShard
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
from psrl.trainer.backends.host_copy import local_part
from psrl.trainer.backends.ulysses import SIZE_KEY, Ulysses
from psrl.trainer.backends.unpadded import KEY as UNPADDED_KEY
from psrl.trainer.backends.unpadded import attention_of, has_kernel, keywords, without_padding

logger = logging.getLogger(__name__)


class FSDP2Backend(BackendCore):
    """Policy model, optimizer and learning-rate warm-up of one trainer rank.

    `model` must be the same on every rank (same weights); each keeps its shard only. A single rank that computes in
    the dtype of its weights is not sharded at all, and needs no process group. `total_steps`: optimizer steps of the
    run, for a schedule that ends. Not `trainable`: frozen weights without an optimizer, for `log_probs` only (the
    reference policy). The model stays in eval mode: dropout would make the log-probs of one and the same weights differ
    between two passes.
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
        dtype = compute_dtype(actor.mixed_precision)
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        sharing = actor.ulysses_sequence_parallel_size
        if sharing > 1 and actor.use_remove_padding:
            raise ValueError(f"{UNPADDED_KEY}=True cannot be had with {SIZE_KEY}={sharing}: leave one of them out")
        rows_mesh = _rows_mesh(device, world_size, sharing) if sharing > 1 else None
        super().__init__(
            actor,
            temperature=temperature,
            total_steps=total_steps,
            device=device,
            dp_rank=rank // sharing,
            dp_size=world_size // sharing,
            dp_group=rows_mesh.get_group("dp") if rows_mesh else None,
        )
        self.hidden_size = int(model.config.hidden_size)
        self._model = model.eval()
        self.can_share_prompts = _has_replaceable_attention(model)
        self._ulysses = self._share_rows(rows_mesh.get_group("sp")) if rows_mesh is not None else None
        if actor.use_remove_padding and not self.can_share_prompts:
            raise ValueError(f"{UNPADDED_KEY}=True needs full attention in every layer: use False for this model")
        able = self.can_share_prompts and sharing == 1 and has_kernel(model.config, device, dtype)
        self._decide_padding(actor, unasked=able)
        if not self.pads:
            model.config._attn_implementation = attention_of(model.config, device, dtype)
        layers = _decoder_layers(model)
        _output_layer(model).register_forward_pre_hook(self._keep_predictors)
        if actor.gradient_checkpointing:
            _checkpoint_activations(layers)
        if self._compiled:
            _compile(layers, any_shape=not self.pads)
        settings = actor.fsdp_config
        offload = settings.param_offload and device.type != "cpu"
        self._host_moments: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._offload_moments = settings.optimizer_offload and not offload and device.type != "cpu"
        if world_size > 1 or dtype != model.dtype or offload:
            _shard(model, layers, dtype, _shard_mesh(device, world_size, settings.fsdp_size), offload)
        else:
            model.to(device)  # type: ignore[arg-type]
        self._parameters = dict(model.named_parameters())
        if trainable:
            self._make_optimizer(actor)
            self._put_moments_away()
        else:
            model.requires_grad_(False)

    def _share_rows(self, group: dist.ProcessGroup) -> Ulysses:
        """With the other ranks of `group`."""
        size = dist.get_world_size(group)
        if not self.can_share_prompts:
            raise ValueError(f"{SIZE_KEY}={size} needs full attention in every layer: use 1 for this model")
        return Ulysses(self._model, group)

    def weight_shards(self) -> Iterator[WeightShard]:
        """See TrainBackend. Names are those of `model.named_parameters()`; a rank's shard may be empty, and replicas of a
        shard publish a part of its rows each. The tensors are the live weights, not copies: use them before the next
        `update`."""
        for name, parameter in self._parameters.items():
            local = local_part(parameter)
            (shard, shards), (replica, replicas) = _places(parameter)
            start, _ = row_range(parameter.shape[0], shard, shards)
            first, end = row_range(local.shape[0], replica, replicas)
            rows = local[first:end]
            yield WeightShard(name=name, full_shape=tuple(parameter.shape), row_start=start + first, local=rows)

    def _token_outputs(self, batch: MicroBatch, entropy: bool = False) -> TokenOutputs:
        """The model runs on all tokens, its output layer only on the positions that predict a trainable token."""
        if self._ulysses is not None:
            return self._outputs_of_part(batch, self._ulysses, entropy)
        targets = batch.loss_mask.flatten().nonzero().squeeze(-1)
        places = predictors_of(batch, targets)
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, **_shared_inputs(batch.layout)}
        if not self.pads:
            row = without_padding(batch)
            inputs, places = keywords(row), row.places[places]
        logits = self._logits(inputs, places)

        def grid(values: torch.Tensor) -> torch.Tensor:
            return grid_of(values, targets, batch.input_ids.shape)

        values, entropies = self._of_outputs(logits, batch.input_ids.flatten()[targets], entropy)
        return grid(values), None if entropies is None else grid(entropies)

    def _outputs_of_part(self, batch: MicroBatch, ulysses: Ulysses, entropy: bool) -> TokenOutputs:
        """The same where this rank runs a part of each row: it answers for the tokens that are predicted there."""
        padded = ulysses.enter(batch)
        targets = padded.loss_mask.flatten().nonzero().squeeze(-1)
        inside, places = ulysses.mine(predictors_of(padded, targets), padded.input_ids.shape[1])
        targets = targets[inside]
        logits = self._logits(ulysses.inputs(padded), places)

        def grid(values: torch.Tensor) -> torch.Tensor:
            return ulysses.leave(grid_of(values, targets, padded.input_ids.shape), batch.input_ids.shape[1])

        values, entropies = self._of_outputs(logits, padded.input_ids.flatten()[targets], entropy)
        return grid(values), None if entropies is None else grid(entropies)

    def _of_outputs(self, outputs: torch.Tensor, tokens: torch.Tensor, entropy: bool) -> TokenOutputs:
        """From what the output layer gives at the predictors of `tokens` [n] to (log-probs, entropies if asked for), each [n]."""
        log_probs = token_log_probs(outputs, tokens, self.temperature, fused=self._compiled)
        return log_probs, token_entropies(outputs, self.temperature) if entropy else None

    def _logits(self, inputs: dict[str, Any], places: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] at the flat `places` [n] of the input."""
        self._predictors = places
        try:
            return self._model(use_cache=False, **inputs).logits
        finally:
            self._predictors = None

    def _keep_predictors(self, _module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the output layer: [rows, length, hidden] -> [n, hidden] at the places that predict the n targets."""
        if self._predictors is None:
            return None
        return (args[0].flatten(0, 1).index_select(0, self._predictors), *args[1:])

    def _backward(self, loss: torch.Tensor) -> None:
        """FSDP averages gradients over ranks, while the loss is already divided by the global token count."""
        (loss * self.world_size).backward()

    def _clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _weights_changed(self) -> None:
        """Weights that FSDP gathered for an earlier pass, and may keep for the next one, are not the weights any more."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _step(self, lr: float) -> None:
        for parameter, moments in self._host_moments.items():
            self._optimizer.state[parameter] |= {k: m.to(self.device) for k, m in moments.items()}
        super()._step(lr)
        for parameter, moments in self._host_moments.items():
            for kind, host in moments.items():
                host.copy_(self._optimizer.state[parameter][kind])
            self._optimizer.state[parameter] |= moments

    def _put_moments_away(self) -> None:
        """With `optimizer_offload` Adam's moments live in host memory, for good; the step works on copies."""
        if self._offload_moments:
            for parameter, state in self._optimizer.state.items():
                self._host_moments[parameter] = {kind: state[kind].to("cpu") for kind in ("exp_avg", "exp_avg_sq")}
                state |= self._host_moments[parameter]

    def _tensors(self, kind: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The live tensors, so loading into them restores in place."""
        return {f"{kind}.{name}": value for name, value in values.items()}

    def _restore(self, kind: str, state: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Nothing: they are the same tensors."""


def _has_replaceable_attention(model: PreTrainedModel) -> bool:
    """Full attention in every layer through a kernel that takes any mask, so another may stand in its place, and positions
    that may be given."""
    config = model.config
    known = "position_ids" in inspect.signature(model.forward).parameters
    return known and has_full_attention(config.to_dict()) and config._attn_implementation == "sdpa"


def _shared_inputs(layout: SharedLayout | None) -> dict[str, torch.Tensor | None]:
    """Positions and attention mask for rows that share prompts."""
    return {} if layout is None else {"position_ids": layout.positions, "attention_mask": shared_mask(layout)}


def _decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The repeated blocks, by the class names that the model itself declares as not to be split."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} declares no decoder layer (_no_split_modules): it cannot be sharded")
    return layers


def _output_layer(model: PreTrainedModel) -> torch.nn.Module:
    layer = model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings: a causal language model is needed")
    return layer


def _checkpoint_activations(layers: list[torch.nn.Module]) -> None:
    """Keep only each layer's input for the backward pass, which runs the layer again."""
    for layer in layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            raise ValueError(
                f"{type(layer).__name__} cannot recompute its activations: set"
                " train_actor_rollout_ref.actor.gradient_checkpointing=False for this model"
            )
        layer.gradient_checkpointing = True
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]
        # The layer recomputes only while its own flag says training; its children keep eval mode, hence no dropout.
        layer.training = True


def _compile(layers: list[torch.nn.Module], any_shape: bool) -> None:
    """One graph for all layers, since they share their code. Only `forward` is compiled, so FSDP's hooks stay outside. `any_shape`:
    hardly two micro-batches have the same, so the graph is made for all of them at once."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=any_shape or None)  # type: ignore[method-assign]


def _places(parameter: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """(this rank's shard, number of shards), (its place among those with the same shard, their number)."""
    if not isinstance(parameter, DTensor):
        return (0, 1), (0, 1)
    mesh = parameter.device_mesh
    shard = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    return shard, (mesh.get_local_rank(0), mesh.size(0)) if mesh.ndim == 2 else (0, 1)


def _rows_mesh(device: torch.device, world_size: int, sharing: int) -> DeviceMesh:
    """Neighbouring ranks share rows."""
    if world_size % sharing:
        raise ValueError(f"{SIZE_KEY}={sharing} does not divide the {world_size} trainer ranks: choose a divisor")
    ensure_process_group(device)
    return init_device_mesh(device.type, (world_size // sharing, sharing), mesh_dim_names=("dp", "sp"))


def _shard_mesh(device: torch.device, world_size: int, fsdp_size: int) -> DeviceMesh:
    """All ranks in one dimension or, with replicas, (replicas, shards)."""
    ensure_process_group(device)
    if fsdp_size < 0 or fsdp_size >= world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("fsdp",))
    if world_size % fsdp_size:
        raise ValueError(
            f"train_actor_rollout_ref.actor.fsdp_config.fsdp_size={fsdp_size} does not divide the {world_size} trainer ranks:"
            " choose a divisor, or -1"
        )
    shape = (world_size // fsdp_size, fsdp_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _shard(
    model: PreTrainedModel, layers: list[torch.nn.Module], dtype: torch.dtype, mesh: DeviceMesh, offload: bool
) -> None:
    """Shard each decoder layer, then what is left (embeddings, final norm, output layer) as one root group."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=place)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=place)
