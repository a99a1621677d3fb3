"""Which GPUs of a node its processes get. Pure but for `visible_gpus`.

Trainer ranks have the first ones, one each; the instances of the node follow. Every process sees all GPUs of the node, its own
first: its devices are then cuda:0, cuda:1, ..., and it can still map memory of a neighbour's GPU (CUDA IPC cannot where that
GPU is hidden).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from psrl.config.errors import ConfigError
from psrl.config.schema import Config

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that a process with this environment may use, as CUDA_VISIBLE_DEVICES spells them. CUDA too takes what
    stands there up to the first name that is none.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "3,GPU-1f2e,NoDevFiles,5"})
    ('3', 'GPU-1f2e')
    """
    given = environ.get(VARIABLE)
    if given is None:
        return tuple(map(str, range(len(list(devices.glob("nvidia[0-9]*"))))))
    names = (name.strip() for name in given.split(","))
    return tuple(takewhile(lambda name: name.isdigit() or name.startswith(("GPU-", "MIG-")), names))


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """The GPUs of a node; the first `ranks` belong to trainer ranks, and to instances too if they are `shared` in turns."""

    names: tuple[str, ...] = ()
    ranks: int = 0
    shared: bool = False

    def of_rank(self, local_rank: int) -> dict[str, str]:
        """Environment of a trainer rank; a rank that has no GPU of its own sees none."""
        return _shown(self.names, local_rank) if local_rank < self.ranks else {VARIABLE: ""}

    def of_instance(self, number: int, each: int) -> dict[str, str]:
        """Environment of the node's instance `number`, which has `each` GPUs. Where there are too few they begin again at the
        first one, and are shared.

        >>> NodeGpus(("0", "1", "2", "3"), ranks=2).of_instance(1, 1)
        {'CUDA_VISIBLE_DEVICES': '3,0,1,2'}
        """
        return _shown(self.names, (0 if self.shared else self.ranks) + number * each) if self.names else {}


def _shown(names: tuple[str, ...], first: int) -> dict[str, str]:
    first %= len(names)
    return {VARIABLE: ",".join(names[first:] + names[:first])}


def node_gpus(config: Config, names: tuple[str, ...], ranks: int) -> NodeGpus:
    """The GPUs `names` of a node with so many trainer ranks, which take none where they compute on the CPU."""
    own = 0 if config.trainer.device == "cpu" or len(names) < ranks else ranks
    return NodeGpus(names, own, config.psrl.colocate)


def check_gpus(config: Config, names: tuple[str, ...], *, one_host: bool) -> list[str]:
    """Refuse trainer ranks that a trainer node has too few GPUs for (ConfigError); warnings of what is shared. `one_host`: the
    whole run is on this node."""
    deployment, device = config.psrl.deployment, config.trainer.device
    ranks = deployment.train_ngpus_per_node * (deployment.train_nnodes if one_host else 1)
    if device != "cpu" and len(names) < ranks and (names or device == "cuda"):
        raise ConfigError(
            f"trainer.device={device} gives each trainer rank a GPU of its own, but this node has {len(names)} for {ranks} ranks "
            "(psrl.deployment.train_ngpus_per_node): use fewer ranks or trainer.device=cpu, or name them in CUDA_VISIBLE_DEVICES."
        )
    _check_route(config, names, one_host)
    each, taken = deployment.rollout_ngpus_per_node_per_instance, node_gpus(config, names, ranks).ranks
    instances = deployment.n_rollout_instances + deployment.n_validate_instances
    needs_gpu = config.gen_actor_rollout_ref.rollout.name != "torch" and bool(names) and not config.psrl.colocate
    if not needs_gpu or not one_host or taken + instances * each <= len(names):
        return []
    return [
        f"{taken} trainer ranks and {instances} instances of {each} GPUs share the {len(names)} GPUs of this node: divide their "
        "memory by trainer.gpu_memory_fraction and the engine's own share."
    ]


def _check_route(config: Config, names: tuple[str, ...], one_host: bool) -> None:
    if config.psrl.weights.route != "vram":
        return
    if config.gen_actor_rollout_ref.rollout.name == "torch":
        missing = "the embedded engine (gen_actor_rollout_ref.rollout.name=torch) has its own in host memory"
    elif config.trainer.device == "cpu":
        missing = "trainer.device=cpu keeps the trainer's in host memory"
    elif one_host and not names:
        missing = "this node has none"
    else:
        return
    raise ConfigError(f"psrl.weights.route=vram moves weights from GPU to GPU, but {missing}: use auto.")
