"""The children of a node's supervisor: what its share of the deployment means as processes. Pure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping

from psrl.config.schema import Config
from psrl.deployment import Share
from psrl.gpus import NodeGpus, node_gpus
from psrl.rundir.layout import RunDir
from psrl.supervisor.children import ChildSpec

NO_GPUS = NodeGpus()


def share_children(config: Config, run_dir: RunDir, share: Share, gpus: tuple[str, ...] = ()) -> list[ChildSpec]:
    """Everything that the share's node runs, the coordinator first. `gpus`: see `visible_gpus`."""
    node = node_gpus(config, gpus, len(share.ranks) + share.ranks_beside)
    children = [coordinator_child(config, run_dir)] if share.leads else []
    children += [trainer_child(config, run_dir, rank, rank - share.ranks.start, node) for rank in share.ranks]
    if share.leads and "wandb" in config.trainer.logger:
        children.append(logger_child(config, run_dir))
    engines = [(instance_child, f"instance-{i}") for i in share.instances]
    engines += [(validator_child, f"validator-{i}") for i in share.validators]
    children += [child(config, run_dir, name, node, place) for place, (child, name) in enumerate(engines)]
    children += [agent_loop_child(config, run_dir, f"agent-loop-{i}") for i in share.agent_loops]
    return children


def coordinator_child(config: Config, run_dir: RunDir) -> ChildSpec:
    return _child(
        "coordinator",
        "coordinator",
        "psrl.coordinator.service",
        run_dir,
        cores=_cores(config.psrl.deployment.train_cores),
        max_restarts=config.psrl.fault_tolerance.coordinator_max_restarts,
        critical=True,
    )


def trainer_child(config: Config, run_dir: RunDir, rank: int, local_rank: int, node: NodeGpus = NO_GPUS) -> ChildSpec:
    deployment = config.psrl.deployment
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(deployment.train_nnodes * deployment.train_ngpus_per_node),
        "OMP_NUM_THREADS": str(deployment.train_cpu_threads),
        **node.of_rank(local_rank),
    }
    cores = _cores(deployment.train_cores)
    return _child("trainer", f"trainer-{rank}", "psrl.trainer.main", run_dir, env=env, cores=cores, critical=True)


def logger_child(config: Config, run_dir: RunDir) -> ChildSpec:
    argv = (sys.executable, "-m", "psrl.telemetry.wandb_logger", str(run_dir.path))
    return ChildSpec(role="logger", name="wandb", argv=argv, cores=_cores(config.psrl.deployment.train_cores))


def instance_child(config: Config, run_dir: RunDir, name: str, node: NodeGpus = NO_GPUS, place: int = 0) -> ChildSpec:
    """`place`: which of the node's engines it is."""
    gpus = node.of_instance(place, config.psrl.deployment.rollout_ngpus_per_node_per_instance)
    return _engine_child(config, run_dir, "instance", name, "psrl.rollout.instance", gpus)


def validator_child(config: Config, run_dir: RunDir, name: str, node: NodeGpus = NO_GPUS, place: int = 0) -> ChildSpec:
    gpus = node.of_instance(place, config.psrl.deployment.rollout_ngpus_per_node_per_instance)
    return _engine_child(config, run_dir, "validator", name, "psrl.rollout.validator", gpus)


def _engine_child(
    config: Config, run_dir: RunDir, role: str, name: str, module: str, gpus: Mapping[str, str]
) -> ChildSpec:
    deployment = config.psrl.deployment
    return _child(
        role,
        name,
        module,
        run_dir,
        env={"OMP_NUM_THREADS": str(deployment.rollout_cpu_threads), **gpus},
        cores=_cores(deployment.rollout_cores),
        max_restarts=config.psrl.fault_tolerance.max_restarts,
    )


def agent_loop_child(config: Config, run_dir: RunDir, name: str) -> ChildSpec:
    return _child(
        "agent_loop",
        name,
        "psrl.rollout.agent_worker",
        run_dir,
        cores=_cores(config.psrl.deployment.rollout_cores),
        max_restarts=config.psrl.fault_tolerance.agent_loop_max_restarts,
    )


def _cores(cores: list[int] | None) -> tuple[int, ...] | None:
    return None if cores is None else tuple(cores)


def _child(role: str, name: str, module: str, run_dir: RunDir, **kwargs) -> ChildSpec:
    argv = (sys.executable, "-m", "psrl.start", module, str(run_dir.path), name)
    return ChildSpec(role=role, name=name, argv=argv, ignored=(signal.SIGUSR2, signal.SIGTERM), **kwargs)
