"""What an allocation writes into the environment: to be kept out of a submission, to be read inside a job step. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from psrl.config.errors import ConfigError
from psrl.slurm.node_list import expand

_SITE = frozenset({"SLURM_CONF", "SLURM_JWT"})
"""Where the cluster is and how it is entered, not what an allocation is."""
_INHERITED = re.compile(
    r"(?:SLURM|SLURMD|SRUN|SBATCH|SALLOC|SUBMITIT|TORCHELASTIC|PMI[0-9X]*)_.*"
    r"|MASTER_(?:ADDR|PORT)"
    r"|(?:(?:LOCAL|NODE|GROUP|ROLE)_)?RANK"
    r"|(?:(?:LOCAL|GROUP|ROLE)_)?WORLD_SIZE"
    r"|PSRL_(?:ATTEMPT|NODE|LOCAL|GENERATION|SIGNAL_DELAY_S)"
    r"|(?:CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)
"""Names by which an allocation, a launcher or a run of this package tells its processes their place and their share."""

_START = "start one task a node over all groups, with `srun --ntasks-per-node=1` in a batch script"


def inherited_names(environ: Mapping[str, str]) -> list[str]:
    """Variables that a submission must not take over from where it is made, sorted."""
    return sorted(name for name in environ if name not in _SITE and _INHERITED.fullmatch(name))


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a submission: without `inherited_names`, as if made from a login node."""
    removed = set(inherited_names(environ))
    return {name: value for name, value in environ.items() if name not in removed}


def no_kill_asked(environ: Mapping[str, str]) -> str | None:
    """The variable that asks Slurm to keep a job whose node is lost, or None. Slurm reads an empty value as yes."""
    for name in ("SBATCH_NO_KILL", "SLURM_NO_KILL"):
        if name in environ and environ[name].lower() not in ("no", "off"):
            return name
    return None


@dataclass(frozen=True, slots=True)
class Group:
    """One component of a heterogeneous job, or the only one of a plain job."""

    ntasks: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Which node of which group a task is."""

    job_id: int
    """The leader's, in every group."""
    restart_count: int
    procid: int
    """Counted over the groups in order."""
    hostname: str
    groups: tuple[Group, ...]
    group: int
    index: int
    """Position in the group's nodes."""


def place_from_environment(environ: Mapping[str, str]) -> NodePlace:
    """The place of this task of a job step, of which every node of every group has exactly one.

    Inside a step of a heterogeneous job SLURM_JOB_NODELIST is the union and SLURM_JOB_PARTITION the last component's;
    the variables of the groups are those of the allocation, whatever the step takes of it. Raises ConfigError, one
    sentence, if this is not such a task.
    """
    step_tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    groups = _groups(environ, step_tasks)
    for number, group in enumerate(groups):
        if group.ntasks != len(group.nodes):
            raise ConfigError(
                f"Group {number} of the job has {group.ntasks} tasks on {len(group.nodes)} nodes ({', '.join(group.nodes)}): {_START}."
            )
    places = [(number, index) for number, group in enumerate(groups) for index in range(group.ntasks)]
    if step_tasks != len(places):
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={step_tasks} is not the number of the job's nodes, {len(places)}: {_START}."
        )
    procid, hostname = _number(environ, "SLURM_PROCID"), _value(environ, "SLURMD_NODENAME")
    number, index = places[procid]
    if groups[number].nodes[index] != hostname:
        raise ConfigError(
            f"SLURM_PROCID={procid} belongs on {groups[number].nodes[index]} but runs on {hostname}: the step's tasks do not "
            "follow the node lists; start srun without SLURM_HOSTFILE and --distribution=arbitrary."
        )
    return NodePlace(
        job_id=_number(environ, "SLURM_JOB_ID"),
        restart_count=int(environ.get("SLURM_RESTART_COUNT", "0")),
        procid=procid,
        hostname=hostname,
        groups=groups,
        group=number,
        index=index,
    )


def node_counts(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Nodes of each group of the job whose batch script this is. Raises ConfigError outside a job.

    >>> node_counts({"SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "4"})
    (1, 4)
    """
    if "SLURM_JOB_NUM_NODES" not in environ and "SLURM_HET_SIZE" not in environ:
        raise ConfigError(
            "SLURM_JOB_NUM_NODES is not set, so this is not a Slurm job: submit the batch script with sbatch."
        )
    if "SLURM_HET_SIZE" not in environ:
        return (_number(environ, "SLURM_JOB_NUM_NODES"),)
    size = _number(environ, "SLURM_HET_SIZE")
    return tuple(_number(environ, f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}") for number in range(size))


def _groups(environ: Mapping[str, str], step_tasks: int) -> tuple[Group, ...]:
    if "SLURM_HET_SIZE" not in environ:
        return (Group(step_tasks, tuple(expand(_value(environ, "SLURM_JOB_NODELIST")))),)
    groups = []
    for number in range(_number(environ, "SLURM_HET_SIZE")):
        nodes = tuple(expand(_value(environ, f"SLURM_JOB_NODELIST_HET_GROUP_{number}")))
        ntasks = f"SLURM_NTASKS_HET_GROUP_{number}"  # there only if the allocation was asked for with a number of tasks
        groups.append(Group(_number(environ, ntasks) if ntasks in environ else len(nodes), nodes))
    return tuple(groups)


def _value(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise ConfigError(f"{name} is not set, so this is not a task of a job step: {_START}.")
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _value(environ, name)
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{name}={value} is refused: Slurm writes a number there; {_START}.")
    return int(value)
