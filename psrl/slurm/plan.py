"""From a run's configuration and the launcher's settings to its job. Pure: what the cluster offers is an argument."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from psrl.config.errors import ConfigError
from psrl.config.schema import DeploymentConfig
from psrl.deployment import instances_per_node, one_node, rollout_nodes
from psrl.slurm.cluster import Partition, check_request
from psrl.slurm.job_text import Component, Job
from psrl.slurm.settings import GroupConf, SlurmConf, time_limit_s

CPUS_EACH = 8
"""CPUs asked for each rank or instance if nothing else is said and the node has them."""

Cluster = Mapping[str, Partition]


@dataclass(frozen=True, slots=True)
class _Need:
    """What a group's nodes must hold by the deployment."""

    nodes: int
    gpus_per_node: int
    processes: int
    """Ranks and instances of a node."""


def plan_job(
    deployment: DeploymentConfig,
    conf: SlurmConf,
    *,
    number: int,
    run_dir: Path,
    python: str,
    cluster: Cluster | None,
    after: str | None = None,
    colocate: bool = False,
) -> Job:
    """The job of sweep member `number`. `cluster` None: nothing is known of it, and nothing about it is checked.

    Raises ConfigError, one sentence, for a deployment or request that cannot be."""
    components = tuple(
        _component(conf, group, need, cluster) for group, need in _needs(deployment, conf.job, colocate).items()
    )  # fmt: skip
    _refuse_shared_partition(components, cluster)
    return Job(
        name=f"{conf.name}-{number}",
        run_dir=run_dir,
        components=components,
        python=conf.python or shlex.quote(python),
        signal_delay_s=conf.signal_delay_s,
        max_requeues=conf.max_requeues,
        after=after,
        setup=tuple(conf.setup or ()),
        srun_args=tuple(conf.srun_args),
        stderr_to_stdout=conf.stderr_to_stdout,
    )


def _needs(deployment: DeploymentConfig, job: str, colocate: bool) -> dict[str, _Need]:
    """Group -> need; a job of one component goes by the trainer group's settings."""
    instances = instances_per_node(deployment)
    trainer = _Need(deployment.train_nnodes, deployment.train_ngpus_per_node, deployment.train_ngpus_per_node)
    rollout = _Need(
        rollout_nodes(deployment), instances * deployment.rollout_ngpus_per_node_per_instance, instances
    )  # fmt: skip
    if colocate and job != "single_node":
        raise ConfigError(
            f"hydra.launcher.job={job} puts trainer and rollout on different nodes, which psrl.colocate=True cannot: set "
            "hydra.launcher.job=single_node, or psrl.colocate=False."
        )
    if job == "het":
        return {"trainer": trainer, "rollout": rollout}
    if job == "plain":
        gpus = max(trainer.gpus_per_node, rollout.gpus_per_node)
        return {"trainer": _Need(trainer.nodes + rollout.nodes, gpus, max(trainer.processes, rollout.processes))}
    one_node(deployment)
    gpus = trainer.gpus_per_node + (0 if colocate else rollout.gpus_per_node)
    return {"trainer": _Need(1, gpus, trainer.processes + rollout.processes)}


def _component(conf: SlurmConf, group: str, need: _Need, cluster: Cluster | None) -> Component:
    own: GroupConf = getattr(conf, group)
    if own.nodes is not None and own.nodes != need.nodes:
        raise ConfigError(
            f"hydra.launcher.{group}.nodes={own.nodes} is refused: psrl.deployment asks for {need.nodes}; change that, or leave this null."
        )
    partition = _first(own.partition, conf.partition)
    known = _partition(cluster, partition)
    gpus = _first(own.gpus_per_node, conf.gpus_per_node)
    if gpus is None and (known is None or any(size.gpus for size in known.sizes)):
        gpus = need.gpus_per_node
    wanted_cpus = CPUS_EACH * need.processes
    cpus = _first(own.cpus_per_task, conf.cpus_per_task) or (
        min(wanted_cpus, known.cpus_per_node) if known else wanted_cpus
    )
    mem_gb, limit_s = _first(own.mem_gb, conf.mem_gb), time_limit_s(conf, group)
    if cluster is not None:
        check_request(
            cluster,
            key=f"hydra.launcher.{group}",
            partition=partition,
            nodes=need.nodes,
            cpus_per_node=cpus,
            gpus_per_node=gpus or 0,
            memory_mb=None if mem_gb is None else 1024 * mem_gb,
            time_s=limit_s,
        )
    return Component(
        nodes=need.nodes,
        cpus_per_task=cpus,
        time_s=limit_s,
        partition=partition,
        gpus_per_node=gpus or None,
        mem_gb=mem_gb,
        directives=_directives(conf, own),
    )


def _refuse_shared_partition(components: tuple[Component, ...], cluster: Cluster | None) -> None:
    """A node cannot be in two components of a heterogeneous job."""
    known = _partition(cluster, components[0].partition)
    total = sum(component.nodes for component in components)
    if known is not None and len({c.partition for c in components}) == 1 and total > known.nodes:
        raise ConfigError(
            f"The job needs {total} nodes of partition {known.name}, which has {known.nodes}: use fewer nodes (psrl.deployment), "
            "another partition for one of the groups, or hydra.launcher.job=single_node."
        )


def _directives(conf: SlurmConf, own: GroupConf) -> tuple[str, ...]:
    named = {
        key: _first(getattr(own, key, None), getattr(conf, key))
        for key in ("account", "qos", "constraint", "gres", "exclude", "comment", "mem_per_gpu", "mem_per_cpu")
    }
    flags = [
        f"--{key.replace('_', '-')}={shlex.quote(str(value))}" for key, value in named.items() if value is not None
    ]
    for key, value in conf.additional_parameters.items():
        flag = f"--{key.replace('_', '-')}"
        flags.append(flag if value is True else f"{flag}={shlex.quote(str(value))}")
    return tuple(dict.fromkeys([*flags, *conf.sbatch, *own.sbatch]))


def _partition(cluster: Cluster | None, name: str | None) -> Partition | None:
    if cluster is None:
        return None
    if name is None:
        return next((p for p in cluster.values() if p.is_default), None)
    return cluster.get(name)


def _first(own, common):
    return common if own is None else own
