"""What the cluster offers, and whether a request fits. Pure, except `read_cluster`, which asks scontrol."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from psrl.config.errors import ConfigError
from psrl.slurm.environment import clean_environment
from psrl.slurm.time_limit import format_time_limit, parse_time_limit

_FIELD = re.compile(r"(?:^|\s)([A-Za-z]\w*)=(\S*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSize:
    """What jobs may use of a node."""

    cpus: int
    gpus: int
    memory_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition; what it has per node is what its smallest node has."""

    name: str
    state: str
    """UP, or DOWN, DRAIN, INACTIVE: no new job starts."""
    is_default: bool
    max_time_s: int | None
    """None: no limit."""
    default_time_s: int | None
    """Limit of a job that asks for none; None: max_time_s."""
    max_nodes: int | None
    """Most nodes of one job; None: all."""
    sizes: tuple[NodeSize, ...]
    """One a node."""

    @property
    def nodes(self) -> int:
        return len(self.sizes)

    @property
    def cpus_per_node(self) -> int:
        return min((size.cpus for size in self.sizes), default=0)

    @property
    def gpus_per_node(self) -> int:
        return min((size.gpus for size in self.sizes), default=0)

    @property
    def memory_mb(self) -> int:
        return min((size.memory_mb for size in self.sizes), default=0)


def parse_cluster(partitions: str, nodes: str) -> dict[str, Partition]:
    """Partitions by name from what `scontrol show partition -o` and `scontrol show node -o` print."""
    found = {}
    all_nodes = list(map(_fields, nodes.splitlines()))
    for fields in map(_fields, partitions.splitlines()):
        if name := fields.get("PartitionName"):
            mine = [node for node in all_nodes if name in node.get("Partitions", "").split(",")]
            found[name] = Partition(
                name=name,
                state=fields["State"],
                is_default=fields["Default"] == "YES",
                max_time_s=parse_time_limit(fields["MaxTime"], key=f"MaxTime of partition {name}"),
                default_time_s=_default_time_s(fields["DefaultTime"], name),
                max_nodes=_limit(fields, "MaxNodes"),
                sizes=tuple(_node_size(node, fields) for node in mine),
            )
    return found


def read_cluster(timeout_s: float = 20.0) -> tuple[dict[str, Partition] | None, str]:
    """The partitions of the cluster that a submission from here goes to, hidden ones too, and "" - or None and why not."""
    deadline = time.monotonic() + timeout_s
    texts = []
    for what in ("partition", "node"):
        try:
            done = subprocess.run(
                ["scontrol", "--all", "--oneliner", "show", what],
                env=clean_environment(os.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=max(0.0, deadline - time.monotonic()),
            )
        except FileNotFoundError:
            return None, "there is no scontrol on this host"
        except subprocess.TimeoutExpired:
            return None, f"scontrol had no answer from the Slurm controller within {timeout_s:g} s"
        if done.returncode:
            return None, f"scontrol failed: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}"
        texts.append(done.stdout)
    return parse_cluster(*texts), ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    nodes: int
    cpus_per_node: int
    gpus_per_node: int
    memory_mb: int
    time_s: int | None


def check_request(
    cluster: Mapping[str, Partition],
    *,
    key: str,
    partition: str | None,
    nodes: int,
    cpus_per_node: int,
    gpus_per_node: int,
    memory_mb: int | None,
    time_s: int | None,
) -> None:
    """Refuse what the cluster would refuse or leave pending for ever: ConfigError, one sentence that begins with `key`.

    `partition` is a name, several with commas (each must take the request), or None for the cluster's default.
    `memory_mb` is a node's, None for the site's default; `time_s` None is no time limit.
    """
    request = _Request(
        nodes=nodes,
        cpus_per_node=cpus_per_node,
        gpus_per_node=gpus_per_node,
        memory_mb=memory_mb or 0,
        time_s=time_s,
    )
    for found in _named(cluster, key, partition):
        if fault := _fault(found, request):
            fitting = [other.name for other in cluster.values() if _fault(other, request) is None]
            way_out = f"or use partition {' or '.join(fitting)}" if fitting else "since no partition takes this request"
            raise ConfigError(f"{key}.{fault}, {way_out}.")


def _named(cluster: Mapping[str, Partition], key: str, partition: str | None) -> Iterator[Partition]:
    names = ", ".join(cluster) or "none"
    if partition is None:
        default = next((found for found in cluster.values() if found.is_default), None)
        if default is None:
            raise ConfigError(
                f"{key}.partition=null is refused: this cluster has no default partition; name one of its partitions ({names})."
            )
        yield default
        return
    for name in partition.split(","):
        if name not in cluster:
            raise ConfigError(
                f"{key}.partition={partition} is refused: there is no partition {name!r}; name one of this cluster's partitions ({names})."
            )
        yield cluster[name]


def _fault(partition: Partition, request: _Request) -> str | None:
    """Why `partition` does not take `request`, and the most that it takes; None if it does."""
    if partition.state != "UP":
        return f"partition={partition.name} is refused: its state is {partition.state}, so it starts no job; wait until it is UP"
    if not partition.sizes:
        return f"partition={partition.name} is refused: it has no nodes; choose another"
    return _count_fault(partition, request.nodes) or _size_fault(partition, request) or _time_fault(partition, request)


def _count_fault(partition: Partition, nodes: int) -> str | None:
    if nodes > partition.nodes:
        most, why = partition.nodes, f"has {partition.nodes}"
    elif partition.max_nodes is not None and nodes > partition.max_nodes:
        most, why = partition.max_nodes, f"has MaxNodes {partition.max_nodes} for a job"
    else:
        return None
    return f"nodes={nodes} is refused: partition {partition.name} {why}; ask for at most {most}"


def _size_fault(partition: Partition, request: _Request) -> str | None:
    """Nodes may differ: what counts is whether enough of them have all that is asked for."""
    sizes, beside = partition.sizes, ""
    for asked, name, resource, unit in (
        (request.gpus_per_node, "gpus_per_node", "gpus", 1),
        (request.cpus_per_node, "cpus_per_task", "cpus", 1),
        (request.memory_mb, "mem_gb", "memory_mb", 1024),
    ):
        most = sorted((getattr(size, resource) for size in sizes), reverse=True)[request.nodes - 1]
        if asked > most:
            several = "no node" if request.nodes == 1 else f"no {request.nodes} nodes"
            enough = f"more than {most / unit:g}" if most else "any"
            return (
                f"{name}={asked / unit:g} is refused: partition {partition.name} has {several} with {beside}{enough}; "
                f"ask for at most {most / unit:g}"
            )
        sizes = tuple(size for size in sizes if getattr(size, resource) >= asked)
        beside += f"{name}={asked / unit:g} and " if asked else ""
    return None


def _time_fault(partition: Partition, request: _Request) -> str | None:
    most, asked = partition.max_time_s, request.time_s
    if most is None or (asked is not None and -(-asked // 60) * 60 <= most):  # Slurm rounds up to whole minutes
        return None
    limit = format_time_limit(most)
    return f"time={format_time_limit(asked)} is refused: partition {partition.name} has MaxTime {limit}; ask for at most {limit}"


def _fields(line: str) -> dict[str, str]:
    """`Key=value` pairs; free text (Reason, Comment) comes last, so the first of a key is the right one."""
    fields: dict[str, str] = {}
    for key, value in _FIELD.findall(line):
        fields.setdefault(key, value)
    return fields


def _limit(fields: Mapping[str, str], key: str) -> int | None:
    value = fields.get(key, "UNLIMITED")
    return None if value == "UNLIMITED" else int(value)


def _default_time_s(text: str, name: str) -> int | None:
    return None if text == "NONE" else parse_time_limit(text, key=f"DefaultTime of partition {name}")


def _node_size(node: Mapping[str, str], partition: Mapping[str, str]) -> NodeSize:
    """A node's resources without what is kept for the system, and within the partition's limits per node."""
    cpus = int(node.get("CPUEfctv") or node["CPUTot"])
    memory_mb = int(node["RealMemory"]) - int(node.get("MemSpecLimit", "0"))
    return NodeSize(
        cpus=min(cpus, _limit(partition, "MaxCPUsPerNode") or cpus),
        gpus=_gpus(node.get("Gres", "")),
        memory_mb=min(memory_mb, _limit(partition, "MaxMemPerNode") or memory_mb),
    )


def _gpus(gres: str) -> int:
    """GPUs in a node's generic resources: `gpu:h100:8(S:0-1),mps:800` has 8."""
    entries = [entry.split(":") for entry in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return sum(int(entry[-1]) if entry[-1].isdigit() else 1 for entry in entries if entry[0] == "gpu")
