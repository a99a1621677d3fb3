"""What every backend does alike: micro-batches to one optimizer step, sums over ranks, the schedule, checkpoints.

A backend adds how log-probs are computed, how gradients become those of the whole step, and what its tensors are called.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from psrl.algorithms.metrics import MetricSums, stack, unstack
from psrl.algorithms.schedule import learning_rate
from psrl.config.schema import ActorConfig
from psrl.trainer.backends.base import LossFn, MicroBatch, SharedLayout, WeightShard
from psrl.trainer.backends.host_copy import StateCopy, local_part
from psrl.trainer.backends.remembered import Remembered
from psrl.trainer.backends.saves import BackgroundSave, checkpoint_errors
from psrl.trainer.backends.unpadded import KEY as UNPADDED_KEY

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TokenOutputs = tuple[torch.Tensor, torch.Tensor | None]
"""See `BackendCore._token_outputs`."""


class BackendCore(ABC):
    """See TrainBackend. Subclasses set `hidden_size`, `pads` and `can_share_prompts`, and call `_make_optimizer` at the end, unless
    they are frozen: then there is `log_probs` only."""

    hidden_size: int
    pads: bool
    can_share_prompts: bool

    def __init__(
        self,
        actor: ActorConfig,
        *,
        temperature: float,
        total_steps: int | None,
        device: torch.device,
        dp_rank: int,
        dp_size: int,
        dp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.temperature = temperature
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.dp_rank, self.dp_size, self._dp_group = dp_rank, dp_size, dp_group
        self.steps = 0
        """Optimizer steps taken so far, over all restarts."""
        self.device = device
        self._compiled = device.type == "cuda" if actor.use_torch_compile is None else actor.use_torch_compile
        self._grad_clip = actor.grad_clip if actor.grad_clip > 0 else math.inf
        self._schedule = partial(
            learning_rate,
            peak=actor.optim.lr,
            warmup_steps=actor.optim.lr_warmup_steps,
            kind=actor.optim.lr_scheduler_type,
            total_steps=total_steps,
            min_ratio=actor.optim.min_lr_ratio,
        )
        self._parameters: dict[str, torch.Tensor] = {}
        """What the optimizer holds and steps."""
        self._predictors: torch.Tensor | None = None
        self._parts: list[MetricSums] = []
        """Of the micro-batches whose gradients wait for `apply_gradients`."""
        self._met_empty = False
        """A step without a trained token was warned about."""
        self._remembered: Remembered | None = None
        self._remembered_steps = 0
        self._save_group: dist.ProcessGroup | None = None
        self._state_copy = StateCopy()

    # ---- what a backend adds -----------------------------------------------------------------------------------

    @abstractmethod
    def _token_outputs(self, batch: MicroBatch, entropy: bool = False) -> TokenOutputs:
        """With gradient: (log-probs, entropies if asked for), float32 [rows, length], 0 where nothing is trained."""

    @abstractmethod
    def _backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradients. The loss is divided by the *global* token count."""

    @abstractmethod
    def _clip_gradients(self) -> float:
        """Complete the gradients over ranks and clip them; returns their norm before that."""

    @abstractmethod
    def weight_shards(self) -> Iterator[WeightShard]: ...

    @abstractmethod
    def _tensors(self, kind: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`kind.<Hugging Face name>` -> the part of `values` (by parameter name) that this rank has, DTensors where there are
        several ranks."""

    @abstractmethod
    def _restore(self, kind: str, state: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `_tensors`, into `values`, in place."""

    @abstractmethod
    def _weights_changed(self) -> None:
        """By an optimizer step, a checkpoint or a swap: whoever keeps something that was made from them makes it again."""

    # ---- TrainBackend ------------------------------------------------------------------------------------------

    def log_probs(self, batch: MicroBatch) -> torch.Tensor:
        """See TrainBackend. Collective: every rank must call it equally often."""
        return self.log_probs_of([batch])[0]

    @torch.no_grad()
    def log_probs_of(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """See TrainBackend. Collective."""
        return [self._token_outputs(batch)[0] for batch in batches]

    def update(self, batches: Sequence[MicroBatch], loss_fn: LossFn) -> dict[str, float]:
        """See TrainBackend. All ranks must pass equally many micro-batches."""
        self.accumulate(batches, loss_fn)
        return self.apply_gradients(0.0 if getattr(loss_fn, "empty", False) else 1.0)

    def accumulate(self, batches: Sequence[MicroBatch], loss_fn: LossFn) -> None:
        """See TrainBackend. All ranks must pass equally many micro-batches."""
        for batch in batches:
            self._backward(self._loss(batch, loss_fn))

    def apply_gradients(self, divisor: float = 1.0) -> dict[str, float]:
        """See TrainBackend and `update`. Collective."""
        parts, self._parts = self._parts, []
        if not parts:
            return self._skipped()
        if divisor == 0.0:
            self._note_empty()
            self._drop_gradients()
            return self._reduce(parts) | self._skipped()
        if divisor != 1.0:
            for gradient in self._gradients():
                gradient.div_(divisor)
        norm = self._clip_gradients()
        lr = self._learning_rate()
        finite = math.isfinite(norm)
        if finite:
            self._step(lr)
        else:
            logger.warning("gradient norm is %s after %d optimizer steps: this step is skipped", norm, self.steps)
        self._drop_gradients()
        metrics = self._reduce(parts)
        return metrics | {"actor/grad_norm": norm, "actor/lr": lr, "actor/skipped_steps": float(not finite)}

    def remember(self) -> None:
        """See TrainBackend."""
        if self._remembered is None:
            weights, *moments = self._kinds().values()
            self._remembered = Remembered(
                map(local_part, weights.values()),
                (local_part(moment) for kind in moments for moment in kind.values()),
                changed=self._weights_changed,
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
        self._drop_gradients()
        self._parts = []
        if self._remembered is None or self.steps == self._remembered_steps:
            return
        self._remembered.go_back()
        self._set_steps(self._remembered_steps)

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Each value added over data-parallel ranks (exact for integers below 2^53)."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.dp_size > 1:
            dist.all_reduce(total, group=self._dp_group)
        return total.tolist()

    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint, all ranks together: weights and two optimizer moments."""
        return 3 * sum(p.numel() * p.element_size() for p in self._tensors("model", self._parameters).values())

    def save(self, directory: Path) -> None:
        """Write this rank's shards of weights and optimizer into `directory`, one file a rank, synced. Collective;
        raises RuntimeError on every rank when one of them fails."""
        with checkpoint_errors(f"cannot write the checkpoint {directory}"):
            dcp.save(self._state(), checkpoint_id=directory, no_dist=self.world_size == 1)

    def save_async(self, directory: Path) -> BackgroundSave:
        """`save` in a thread, from a copy in host memory that is made before this returns. Collective, and so is the writing:
        it meets in a process group of its own. One at a time."""
        if self.world_size > 1 and self._save_group is None:
            self._save_group = dist.new_group(backend="gloo")
        return BackgroundSave(
            self._state_copy.of(self._state()), directory, self._save_group, no_dist=self.world_size == 1
        )

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, also with another number of ranks or another backend. Collective; raises
        RuntimeError on every rank when one of them fails."""
        state = self._state()
        with checkpoint_errors(f"cannot load the checkpoint {directory}"):
            dcp.load(state, checkpoint_id=directory, no_dist=self.world_size == 1)
        for kind, values in self._kinds().items():
            self._restore(kind, state, values)
        self._set_steps(int(state["steps"]))
        self._weights_changed()

    def resident_tensors(self) -> Iterator[torch.Tensor]:
        """Everything that this rank keeps on its device between two steps, the live tensors: weights, buffers, moments."""
        model: torch.nn.Module | None = getattr(self, "_model", None)
        held = [*self._parameters.values(), *(() if model is None else (*model.parameters(), *model.buffers()))]
        if (optimizer := getattr(self, "_optimizer", None)) is not None:
            held += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        yield from map(local_part, held)

    # ---- parts -------------------------------------------------------------------------------------------------

    def _decide_padding(self, actor: ActorConfig, unasked: bool) -> None:
        """Whether to leave it out: as the configuration says, else `unasked`. Sequences without have no prompt in common either."""
        self.pads = not (unasked if actor.use_remove_padding is None else actor.use_remove_padding)
        if self.pads:
            return
        if actor.use_shared_prompt and self.rank == 0:
            logger.info(
                "micro-batches have no padding (%s), and each response a copy of its prompt: use_shared_prompt is off",
                UNPADDED_KEY,
            )
        self.can_share_prompts = False

    def _loss(self, batch: MicroBatch, loss_fn: LossFn) -> torch.Tensor:
        """Of a micro-batch, with gradient; its partial metrics are kept."""
        log_probs, entropy = self._token_outputs(batch, getattr(loss_fn, "needs_entropy", False))
        loss, sums = loss_fn(*((log_probs, batch) if entropy is None else (log_probs, batch, entropy)))
        self._parts.append(sums)
        return loss

    def _gradients(self) -> Iterator[torch.Tensor]:
        """Those that wait for `apply_gradients`."""
        return (p.grad for p in self._parameters.values() if p.grad is not None)

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _make_optimizer(self, actor: ActorConfig) -> None:
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=actor.optim.lr,
            betas=(actor.optim.betas[0], actor.optim.betas[1]),
            weight_decay=actor.optim.weight_decay,
            fused=True,
        )
        for parameter in self._parameters.values():  # now, so that `load` has somewhere to load to
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _set_steps(self, steps: int) -> None:
        self.steps = steps
        for parameter in self._parameters.values():
            self._optimizer.state[parameter]["step"].fill_(steps)

    def _learning_rate(self) -> float:
        return self._schedule(self.steps)

    def _skipped(self) -> dict[str, float]:
        return {"actor/grad_norm": 0.0, "actor/lr": self._learning_rate(), "actor/skipped_steps": 1.0}

    def _note_empty(self) -> None:
        if not self._met_empty:
            self._met_empty = True
            logger.warning(
                "no token of an optimizer step may be trained (all are masked or rejected): it is skipped, after %d steps; "
                "further ones are only counted (skipped_steps)",
                self.steps,
            )

    def _step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.steps += 1
        self._weights_changed()

    def _reduce(self, parts: list[MetricSums]) -> dict[str, float]:
        added, sums, extreme, maxima = stack(parts)
        if self.dp_size > 1:
            dist.all_reduce(sums, group=self._dp_group)
            if extreme:
                dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._dp_group)
        return unstack(added, sums, extreme, maxima)

    def _kinds(self) -> dict[str, dict[str, torch.Tensor]]:
        """The weights and Adam's two moments, by parameter name."""
        moments = {
            kind: {name: self._optimizer.state[parameter][kind] for name, parameter in self._parameters.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        return {"model": {name: parameter.detach() for name, parameter in self._parameters.items()}, **moments}

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds, under Hugging Face names whatever the backend."""
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for kind, values in self._kinds().items():
            state |= self._tensors(kind, values)
        return state


def grid_of(log_probs: torch.Tensor, targets: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[rows, length] with `log_probs` [n] at the flat places `targets` [n], 0 elsewhere."""
    return log_probs.new_zeros(shape.numel()).index_copy(0, targets, log_probs).view(shape)


def predictors_of(batch: MicroBatch, targets: torch.Tensor) -> torch.Tensor:
    """Flat places [n] whose output predicts the tokens at flat places `targets` [n]."""
    if batch.layout is None:
        return targets - 1
    length = batch.input_ids.shape[1]
    return targets - targets % length + batch.layout.predictors.flatten()[targets]


def shared_mask(layout: SharedLayout | None) -> torch.Tensor | None:
    """bool [rows, 1, length, length], True: attend; None for rows of one sample each, which need no mask."""
    if layout is None:
        return None
    segments = layout.segments
    earlier = torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool, device=segments.device).tril()
    related = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    return (related & earlier)[:, None]


def row_range(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rows [start, end) of a tensor that `rank` holds: ceil-sized chunks, the last ones short or empty.

    `[row_range(5, r, 4) for r in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]`.
    """
    chunk = -(-num_rows // world_size)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


def compute_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(
            f"train_actor_rollout_ref.actor.mixed_precision is {name!r}; it must be one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def ensure_process_group(device: torch.device) -> None:
    """A process group of one where nobody made one: the libraries below insist."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
