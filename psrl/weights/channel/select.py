"""Publisher and puller of the weight channel that the run uses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from psrl.colocate.choices import publishes_from_host
from psrl.weights.broadcast import FANOUT
from psrl.weights.channel.base import WeightPublisher, WeightPuller
from psrl.weights.channel.nixl_agent import prepare_environment
from psrl.weights.mode import choose_mode, nixl_available, settled_mode
from psrl.weights.plan import Place, Specs, same_place
from psrl.weights.split import Split

if TYPE_CHECKING:
    from psrl.role import Role


def _mode(role: Role) -> str:
    """The run's channel; RuntimeError if it is NIXL and NIXL cannot be loaded on this node."""
    mode = settled_mode(role.run_dir)
    if mode == "nixl":
        prepare_environment(role.address)
        return choose_mode(mode, nixl_available())
    return mode


def make_publisher(role: Role, rank: int, num_ranks: int) -> WeightPublisher:
    """The publisher of trainer rank `rank`; weights are cast to the dtype that the engines generate with and laid out for
    their parallelism."""
    dtype = getattr(torch, role.config.gen_actor_rollout_ref.rollout.dtype or role.config.model.dtype)
    split = engine_split(role)
    if _mode(role) == "nixl":
        from psrl.weights.channel.nixl_publisher import NixlPublisher

        deployment = role.config.psrl.deployment
        readers = (deployment.n_rollout_instances + deployment.n_validate_instances) * split.ways * split.stages
        return NixlPublisher(
            role.run_dir,
            rank,
            num_ranks,
            dtype,
            address=role.address,
            peers=max(64, 2 * readers),
            split=split,
            on_host=publishes_from_host(role.config),
        )
    from psrl.weights.channel.filesystem import FilesystemPublisher

    return FilesystemPublisher(role.run_dir, rank, num_ranks, dtype, split)


def make_puller(
    role: Role, expected: Specs, place: Place = same_place, device: torch.device | str = "cpu"
) -> WeightPuller:
    """The puller of an instance whose engine wants the tensors of `expected` (`Engine.weight_specs`)."""
    if _mode(role) == "nixl":
        from psrl.weights.channel.nixl_puller import NixlPuller

        route, fanout = role.config.psrl.weights.route, broadcast_fanout(role)
        return NixlPuller(
            role.run_dir, expected, place, device=device, address=role.address, route=route, fanout=fanout
        )
    from psrl.weights.channel.filesystem import FilesystemPuller

    return FilesystemPuller(role.run_dir, expected, place)


def engine_split(role: Role) -> Split:
    """How the engines cut the weights: their tensor and pipeline parallelism, and the heads that they can be cut at."""
    rollout = role.config.gen_actor_rollout_ref.rollout
    ways = getattr(rollout, "tensor_model_parallel_size", 1)
    stages = getattr(rollout, "pipeline_model_parallel_size", 1)
    if ways == 1:
        return Split(stages=stages)
    from psrl.models.resolve import run_model

    config = json.loads((run_model(role.run_dir).path / "config.json").read_text())
    return Split(ways, config.get("num_key_value_heads") or config["num_attention_heads"], stages)


def broadcast_fanout(role: Role) -> int:
    """Nodes that read the first version from one source, 0: all from the trainers."""
    return FANOUT if role.config.psrl.broadcast_init else 0


RECEIVER = "psrl.weights.receiver:WeightReceiver"
"""What pulls weights inside the process that owns an engine's GPU; it needs `receiver_settings`."""


def receiver_settings(role: Role) -> dict[str, Any] | None:
    """What a receiver has to know of the run, in plain values that any process can be given. None if weights go through
    the filesystem: then the instance pulls."""
    if _mode(role) != "nixl":
        return None
    split = engine_split(role)
    return {
        "run_dir": str(role.run_dir.path),
        "address": role.address,
        "route": role.config.psrl.weights.route,
        "fanout": broadcast_fanout(role),
        "ways": split.ways,
        "num_kv_heads": split.num_kv_heads,
    }
