"""TrainBackend on PyTorch FSDP2 (`fully_shard`) for any Hugging Face causal model, on CPU (gloo) or CUDA (nccl).

Rows are right-padded, so a causal model needs no padding mask: no real token ever looks at padding.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from psrl.algorithms.metrics import MetricSums, stack, unstack
from psrl.algorithms.schedule import learning_rate
from psrl.algorithms.token_entropy import token_entropies
from psrl.algorithms.token_log_probs import token_log_probs
from psrl.config.schema import ActorConfig
from psrl.trainer.backends.base import LossFn, MicroBatch, SharedLayout, WeightShard
from psrl.trainer.backends.remembered import Remembered

logger = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def row_range(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rows [start, end) of a tensor that `rank` holds under FSDP2: ceil-sized chunks, the last ones short or empty.

    `[row_range(5, r, 4) for r in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]`.
    """
    chunk = -(-num_rows // world_size)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


class FSDP2Backend:
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
        mesh: DeviceMesh | None = None,
    ) -> None:
        device = torch.device(device)
        self.temperature = temperature
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.steps = 0
        """Optimizer steps taken so far, over all restarts."""
        self.hidden_size = int(model.config.hidden_size)
        self.can_share_prompts = _can_share_prompts(model)
        self._device = device
        self._schedule = partial(
            learning_rate,
            peak=actor.optim.lr,
            warmup_steps=actor.optim.lr_warmup_steps,
            kind=actor.optim.lr_scheduler_type,
            total_steps=total_steps,
            min_ratio=actor.optim.min_lr_ratio,
        )
        self._grad_clip = actor.grad_clip if actor.grad_clip > 0 else math.inf
        self._predictors: torch.Tensor | None = None
        self._parts: list[MetricSums] = []
        """Of the micro-batches whose gradients wait for `apply_gradients`."""
        self._remembered: Remembered | None = None
        self._remembered_steps = 0
        self._model = model.eval()
        layers = _decoder_layers(model)
        _output_layer(model).register_forward_pre_hook(self._keep_predictors)
        if actor.gradient_checkpointing:
            _checkpoint_activations(layers)
        compute_dtype = _dtype(actor.mixed_precision)
        if self.world_size > 1 or compute_dtype != model.dtype:
            _shard(model, layers, compute_dtype, mesh or _default_mesh(device, self.world_size))
        else:
            model.to(device)  # type: ignore[arg-type]
        self._parameters = dict(model.named_parameters())
        if trainable:
            self._make_optimizer(actor)
        else:
            model.requires_grad_(False)

    def _make_optimizer(self, actor: ActorConfig) -> None:
        """AdamW with its moments allocated now, so that `load` has somewhere to load to."""
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=actor.optim.lr,
            betas=(actor.optim.betas[0], actor.optim.betas[1]),
            weight_decay=actor.optim.weight_decay,
            fused=True,
        )
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self._device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def log_probs(self, batch: MicroBatch) -> torch.Tensor:
        """See TrainBackend. Collective: every rank must call it equally often."""
        return self._token_outputs(batch)[0]

    def update(self, batches: Sequence[MicroBatch], loss_fn: LossFn) -> dict[str, float]:
        """See TrainBackend. All ranks must pass equally many micro-batches. No micro-batch at all: no step is taken.

        A gradient that is not finite is not applied: the step is skipped on all ranks and `actor/skipped_steps` is 1.
        """
        self.accumulate(batches, loss_fn)
        return self.apply_gradients()

    def accumulate(self, batches: Sequence[MicroBatch], loss_fn: LossFn) -> None:
        """See TrainBackend. All ranks must pass equally many micro-batches."""
        for batch in batches:
            loss, sums = loss_fn(*self._loss_inputs(batch, getattr(loss_fn, "needs_entropy", False)))
            # FSDP averages gradients over ranks, while the loss is already divided by the global token count.
            (loss * self.world_size).backward()
            self._parts.append(sums)

    def apply_gradients(self, divisor: float = 1.0) -> dict[str, float]:
        """See TrainBackend and `update`. Collective."""
        parts, self._parts = self._parts, []
        if not parts:
            return {"actor/grad_norm": 0.0, "actor/lr": self._learning_rate(), "actor/skipped_steps": 1.0}
        if divisor != 1.0:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)
        norm = self._clip_gradients()
        lr = self._learning_rate()
        finite = math.isfinite(norm)
        if finite:
            self._step(lr)
        else:
            logger.warning("gradient norm is %s after %d optimizer steps: this step is skipped", norm, self.steps)
        self._optimizer.zero_grad(set_to_none=True)
        metrics = self._reduce(parts)
        return metrics | {"actor/grad_norm": norm, "actor/lr": lr, "actor/skipped_steps": float(not finite)}

    def remember(self) -> None:
        """See TrainBackend."""
        if self._remembered is None:
            moments = [self._optimizer.state[p][name] for p in self._parameters.values() for name in _MOMENTS]
            self._remembered = Remembered(
                map(_local, self._parameters.values()), map(_local, moments), changed=self._forget_gathered
            )
        self._remembered.take()
        self._remembered_steps = self.steps

    @contextmanager
    def as_remembered(self) -> Iterator[None]:
        """See TrainBackend. Costs nothing while no step was taken since."""
        if self._remembered is None or self.steps == self._remembered_steps:
            yield
            return
        with self._remembered.weights():
            yield

    def go_back(self) -> None:
        """See TrainBackend."""
        self._optimizer.zero_grad(set_to_none=True)
        self._parts = []
        if self._remembered is None or self.steps == self._remembered_steps:
            return
        self._remembered.go_back()
        self._set_steps(self._remembered_steps)

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Each value added over all ranks (exact for integers below 2^53)."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def weight_shards(self) -> Iterator[WeightShard]:
        """See TrainBackend. Names are those of `model.named_parameters()`; a rank's shard may be empty. The tensors are
        the live weights, not copies: use them before the next `update`."""
        for name, parameter in self._parameters.items():
            start, _ = row_range(parameter.shape[0], *self._shard_of(parameter))
            yield WeightShard(name=name, full_shape=tuple(parameter.shape), row_start=start, local=_local(parameter))

    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint, all ranks together: weights and two optimizer moments."""
        return 3 * sum(p.numel() * p.element_size() for p in self._parameters.values())

    def save(self, directory: Path) -> None:
        """Write this rank's shards of weights and optimizer into `directory`, one file a rank, synced. Collective;
        raises RuntimeError on every rank when one of them fails."""
        with _checkpoint_errors(f"cannot write the checkpoint {directory}"):
            dcp.save(self._state(), checkpoint_id=directory, no_dist=self.world_size == 1)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, also with another number of ranks. Collective; raises RuntimeError on every rank
        when one of them fails."""
        state = self._state()
        with _checkpoint_errors(f"cannot load the checkpoint {directory}"):
            dcp.load(state, checkpoint_id=directory, no_dist=self.world_size == 1)
        self._set_steps(int(state["steps"]))

    def _set_steps(self, steps: int) -> None:
        self.steps = steps
        for parameter in self._parameters.values():
            self._optimizer.state[parameter]["step"].fill_(steps)

    def _forget_gathered(self) -> None:
        """Weights that FSDP gathered for an earlier pass, and may keep for the next one, are not the weights any more."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _loss_inputs(self, batch: MicroBatch, needs_entropy: bool) -> tuple[Any, ...]:
        """What `loss_fn` is called with."""
        log_probs, entropy = self._token_outputs(batch, needs_entropy)
        return (log_probs, batch) if entropy is None else (log_probs, batch, entropy)

    def _token_outputs(self, batch: MicroBatch, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log-probs, entropies if asked for), float32 [rows, length], 0 where nothing is trained. The model runs on all
        tokens, its output layer only on the positions that predict a trainable token."""
        targets = batch.loss_mask.flatten().nonzero().squeeze(-1)
        self._predictors = _predictors(batch, targets)
        try:
            logits = self._model(input_ids=batch.input_ids, use_cache=False, **_shared_inputs(batch.layout)).logits
        finally:
            self._predictors = None

        def grid(values: torch.Tensor) -> torch.Tensor:
            flat = values.new_zeros(batch.input_ids.numel()).index_copy(0, targets, values)
            return flat.view(batch.input_ids.shape)

        log_probs = token_log_probs(logits, batch.input_ids.flatten()[targets], self.temperature)
        return grid(log_probs), grid(token_entropies(logits, self.temperature)) if entropy else None

    def _keep_predictors(self, _module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the output layer: [rows, length, hidden] -> [n, hidden] at the places that predict the n targets."""
        if self._predictors is None:
            return None
        return (args[0].flatten(0, 1).index_select(0, self._predictors), *args[1:])

    def _clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _learning_rate(self) -> float:
        return self._schedule(self.steps)

    def _step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.steps += 1

    def _reduce(self, parts: list[MetricSums]) -> dict[str, float]:
        added, sums, extreme, maxima = stack(parts)
        if self.world_size > 1:
            dist.all_reduce(sums)
            if extreme:
                dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return unstack(added, sums, extreme, maxima)

    def _shard_of(self, parameter: torch.Tensor) -> tuple[int, int]:
        if isinstance(parameter, DTensor):
            return parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
        return 0, 1

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds; the tensors are the live ones, so loading into it restores in place."""
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state[parameter]
            state[f"model.{name}"] = parameter.detach()
            state[f"exp_avg.{name}"] = moments["exp_avg"]
            state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return state


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, the live one."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _can_share_prompts(model: PreTrainedModel) -> bool:
    """Full attention in every layer through a kernel that takes any mask, and positions that may be given."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    known = "position_ids" in inspect.signature(model.forward).parameters
    return known and kinds == {"full_attention"} and window is None and config._attn_implementation == "sdpa"


def _predictors(batch: MicroBatch, targets: torch.Tensor) -> torch.Tensor:
    """Flat places [n] whose output predicts the tokens at flat places `targets` [n]."""
    if batch.layout is None:
        return targets - 1
    length = batch.input_ids.shape[1]
    return targets - targets % length + batch.layout.predictors.flatten()[targets]


def _shared_inputs(layout: SharedLayout | None) -> dict[str, torch.Tensor]:
    """Positions and attention mask (bool [rows, 1, length, length], True: attend) for rows that share prompts."""
    if layout is None:
        return {}
    segments = layout.segments
    earlier = torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool, device=segments.device).tril()
    related = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    return {"position_ids": layout.positions, "attention_mask": (related & earlier)[:, None]}


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(
            f"train_actor_rollout_ref.actor.mixed_precision is {name!r}; it must be one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


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


@contextmanager
def _checkpoint_errors(what: str) -> Iterator[None]:
    """CheckpointException is no Exception, and a single process gets a warning about the missing process group."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        raise RuntimeError(f"{what}: {error}") from error


def _default_mesh(device: torch.device, world_size: int) -> DeviceMesh:
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (world_size,), mesh_dim_names=("fsdp",))


def _shard(model: PreTrainedModel, layers: list[torch.nn.Module], compute_dtype: torch.dtype, mesh: DeviceMesh) -> None:
    """Shard each decoder layer, then what is left (embeddings, final norm, output layer) as one root group."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
