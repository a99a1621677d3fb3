"""Which weight channel a run uses: `psrl.ps_mode`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from psrl.colocate.choices import publishes_from_host
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.rundir.layout import RunDir
from psrl.rundir.publish import publish, read_published
from psrl.weights.channel.base import WeightPublisher, WeightPuller
from psrl.weights.channel.nixl_agent import nixl_available, prepare_environment
from psrl.weights.plan import Place, Specs, same_place
from psrl.weights.split import Split

if TYPE_CHECKING:
    from psrl.role import Role

MODES = ("auto", "nixl", "filesystem")

log = logging.getLogger(__name__)


def choose_mode(ps_mode: str, missing: str | None) -> str:
    """ "nixl" or "filesystem" for `psrl.ps_mode`; `missing` is why NIXL cannot be loaded here, None if it can.

    ValueError for an unknown mode, RuntimeError if NIXL was asked for by name and cannot be had.
    """
    if ps_mode not in MODES:
        raise ValueError(f"psrl.ps_mode={ps_mode}: unknown weight channel, use one of {', '.join(MODES)}")
    if ps_mode == "nixl" and missing is not None:
        raise RuntimeError(
            f"psrl.ps_mode=nixl: nixl cannot be loaded here ({missing}); install nixl-cu13==1.5.1 or set "
            "psrl.ps_mode=filesystem"
        )
    if ps_mode == "auto" and missing is not None:
        log.warning("weights go through the run directory, which is slower: nixl cannot be loaded here (%s)", missing)
    return "filesystem" if ps_mode == "filesystem" or missing is not None else "nixl"


def settle_mode(config: Config, run_dir: RunDir) -> str:
    """Decide once for the whole run, so that no two roles decide differently. Raises ConfigError if the channel that was
    asked for by name cannot be had."""
    note = _note(run_dir)
    if not note.exists():
        prepare_environment(None)
        missing = None if config.psrl.ps_mode == "filesystem" else nixl_available()
        try:
            publish(note, choose_mode(config.psrl.ps_mode, missing).encode())
        except RuntimeError as error:
            raise ConfigError(f"{error}.") from error
    return read_published(note).decode()


def _mode(role: Role) -> str:
    """The run's channel; RuntimeError if it is NIXL and NIXL cannot be loaded on this node."""
    mode = read_published(_note(role.run_dir)).decode()
    if mode == "nixl":
        prepare_environment(role.address)
        return choose_mode(mode, nixl_available())
    return mode


def _note(run_dir: RunDir) -> Path:
    return run_dir.data / "weight_channel"


def make_publisher(role: Role, rank: int, num_ranks: int) -> WeightPublisher:
    """The publisher of trainer rank `rank`; weights are cast to the dtype that the engines generate with and laid out for
    their tensor parallelism."""
    dtype = getattr(torch, role.config.gen_actor_rollout_ref.rollout.dtype or role.config.model.dtype)
    split = engine_split(role)
    if _mode(role) == "nixl":
        from psrl.weights.channel.nixl_publisher import NixlPublisher

        deployment = role.config.psrl.deployment
        readers = (deployment.n_rollout_instances + deployment.n_validate_instances) * split.ways
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

        route = role.config.psrl.weights.route
        return NixlPuller(role.run_dir, expected, place, device=device, address=role.address, route=route)
    from psrl.weights.channel.filesystem import FilesystemPuller

    return FilesystemPuller(role.run_dir, expected, place)


def engine_split(role: Role) -> Split:
    """How the engines cut the weights: their tensor parallelism, and the heads that it can be cut at."""
    ways = getattr(role.config.gen_actor_rollout_ref.rollout, "tensor_model_parallel_size", 1)
    if ways == 1:
        return Split()
    from psrl.models.resolve import run_model

    config = json.loads((run_model(role.run_dir).path / "config.json").read_text())
    return Split(ways, config.get("num_key_value_heads") or config["num_attention_heads"])


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
        "ways": split.ways,
        "num_kv_heads": split.num_kv_heads,
    }
