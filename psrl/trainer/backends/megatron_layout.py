"""How the trainer ranks share a model under Megatron: its process groups, and this rank's place in each."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

with warnings.catch_warnings():  # without Apex and TransformerEngine it says so at length, and works
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

from psrl.config.megatron import MegatronConfig

PREFIX = "train_actor_rollout_ref.actor.megatron."


@dataclass(frozen=True)
class Place:
    """This rank among those of one kind of parallelism."""

    group: dist.ProcessGroup

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.group)


@dataclass(frozen=True, slots=True)
class Dealt:
    """The ranks that the experts are dealt to, in order: equally many to each, the tensor-parallel ranks of one place of `exchange`
    side by side."""

    exchange: Place
    tensor: Place

    @property
    def size(self) -> int:
        return self.exchange.size * self.tensor.size

    @property
    def rank(self) -> int:
        return self.exchange.rank * self.tensor.size + self.tensor.rank


@dataclass(frozen=True, slots=True)
class Layout:
    """`tensor` ranks share each layer's matrices, `pipeline` ranks the layers, `context` ranks each row, `data` ranks the samples.
    `replicas` have the same parameters: data x context. `embedding`: the first and the last stage, None between them.
    Of the replicas, those side by side share the experts (`dealt`), and `expert_replicas` have the same ones. `mesh` has the dimensions
    pipeline, expert_replicas, experts, tensor; None for a single rank."""

    tensor: Place
    pipeline: Place
    context: Place
    data: Place
    replicas: Place
    embedding: dist.ProcessGroup | None
    dealt: Dealt
    expert_replicas: Place
    mesh: DeviceMesh | None


def init_layout(settings: MegatronConfig, device: torch.device) -> Layout:
    """Megatron's process groups. They are global to a process: a second model must ask for the same sizes. ValueError for sizes
    whose product does not divide the ranks."""
    sizes = {
        name: getattr(settings, name)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    }
    tensor, stages, context = sizes.values()
    ranks, asked = dist.get_world_size(), " x ".join(f"{name}={size}" for name, size in sizes.items())
    if ranks % (tensor * stages * context):
        raise ValueError(f"{PREFIX}{asked} does not divide the {ranks} trainer ranks")
    replicas, experts = ranks // tensor // stages, settings.expert_model_parallel_size
    if replicas % experts:
        raise ValueError(
            f"{PREFIX}expert_model_parallel_size={experts} does not divide the {replicas} ranks that have the same layers"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes)
    mesh, tensor_ranks = None, Place(parallel_state.get_tensor_model_parallel_group())
    if ranks > 1:
        mesh = init_device_mesh(
            device.type,
            (stages, replicas // experts, experts, tensor),
            mesh_dim_names=("pipeline", "expert_replicas", "experts", "tensor"),
        )
    layout = Layout(
        tensor=tensor_ranks,
        pipeline=Place(parallel_state.get_pipeline_model_parallel_group()),
        context=Place(parallel_state.get_context_parallel_group()),
        data=Place(parallel_state.get_data_parallel_group()),
        replicas=Place(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        embedding=parallel_state.get_embedding_group(check_initialized=False),
        dealt=Dealt(Place(mesh["experts"].get_group()) if mesh else tensor_ranks, tensor_ranks),
        expert_replicas=Place(mesh["expert_replicas"].get_group()) if mesh else tensor_ranks,
        mesh=mesh,
    )
    if (layout.tensor.size, layout.pipeline.size, layout.context.size) != (tensor, stages, context):
        raise ValueError(f"{PREFIX}{asked}, but another model of this process has other sizes")
    return layout
