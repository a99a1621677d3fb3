"""Which node runs what: `psrl.deployment` as shares of nodes. Pure; the same for one host, a plain job and a het job."""

from __future__ import annotations

from dataclasses import dataclass, replace

from psrl.config.errors import ConfigError
from psrl.config.schema import DeploymentConfig


@dataclass(frozen=True, slots=True)
class Share:
    """What one node's supervisor starts. Numbers are those of the whole run."""

    name: str
    ranks: range = range(0)
    instances: range = range(0)
    validators: range = range(0)
    agent_loops: range = range(0)
    ranks_beside: int = 0
    """Trainer ranks on the same host that another share starts."""

    @property
    def leads(self) -> bool:
        """The node of trainer rank 0 also has the coordinator and the dashboard logger, and prepares the run."""
        return 0 in self.ranks


def instances_per_node(deployment: DeploymentConfig) -> int:
    """Instances of one rollout node, those that validate included; every rollout node has the same number."""
    return _instances(deployment) // rollout_nodes(deployment)


def _instances(deployment: DeploymentConfig) -> int:
    return deployment.n_rollout_instances + deployment.n_validate_instances


def rollout_nodes(deployment: DeploymentConfig) -> int:
    """Rollout nodes that the instances need. Raises ConfigError if they do not divide evenly.

    >>> rollout_nodes(DeploymentConfig(n_rollout_instances=8, rollout_ngpus_per_node_per_instance=2, rollout_ngpus_per_node=8))
    2
    """
    each, room = deployment.rollout_ngpus_per_node_per_instance, deployment.rollout_ngpus_per_node
    if each > room or room % each:
        raise ConfigError(
            f"psrl.deployment.rollout_ngpus_per_node_per_instance={each} does not divide "
            f"psrl.deployment.rollout_ngpus_per_node={room}: choose a divisor, so that no GPU of a rollout node stays idle."
        )
    instances, validators = _instances(deployment), deployment.n_validate_instances
    nodes = -(-instances // (room // each))
    if instances % nodes:
        with_validators = f" with n_validate_instances={validators}" if validators else ""
        fewer, more = instances - instances % (room // each), nodes * (room // each)
        raise ConfigError(
            f"psrl.deployment.n_rollout_instances={deployment.n_rollout_instances}{with_validators} does not divide over {nodes} rollout "
            f"nodes of {room // each} instances: use {fewer} or {more} instances{' in all' if validators else ''}, or another "
            "psrl.deployment.rollout_ngpus_per_node."
        )
    return nodes


def trainer_shares(deployment: DeploymentConfig) -> list[Share]:
    """One share a trainer node, rank 0's first."""
    n = deployment.train_ngpus_per_node
    return [
        Share(f"trainer-node-{node}", ranks=range(node * n, (node + 1) * n)) for node in range(deployment.train_nnodes)
    ]


def rollout_shares(deployment: DeploymentConfig) -> list[Share]:
    """One share a rollout node; instances that validate take the last places of the last nodes.

    >>> d = DeploymentConfig(n_rollout_instances=3, n_validate_instances=1, rollout_ngpus_per_node=2)
    >>> [(s.instances, s.validators) for s in rollout_shares(d)]
    [(range(0, 2), range(0, 0)), (range(2, 3), range(0, 1))]
    """
    n, loops, rollouts = instances_per_node(deployment), deployment.n_agent_loops, deployment.n_rollout_instances
    return [
        Share(
            f"rollout-node-{node}",
            instances=range(min(node * n, rollouts), min((node + 1) * n, rollouts)),
            validators=range(max(node * n - rollouts, 0), max((node + 1) * n - rollouts, 0)),
            agent_loops=range(node * loops, (node + 1) * loops),
        )
        for node in range(rollout_nodes(deployment))
    ]


def total_agent_loops(deployment: DeploymentConfig) -> int:
    return deployment.n_agent_loops * rollout_nodes(deployment)


def one_host(deployment: DeploymentConfig) -> list[Share]:
    """Trainers and rollouts on the same host, a share each, however many nodes the deployment would take."""
    trainers = _merged("supervisor-trainer", trainer_shares(deployment))
    rollouts = _merged("supervisor-rollout", rollout_shares(deployment))
    return [trainers, replace(rollouts, ranks_beside=len(trainers.ranks))]


def one_node(deployment: DeploymentConfig) -> Share:
    """Everything in one share. Raises ConfigError if the deployment asks for more than a single node."""
    trainers, rollouts = trainer_shares(deployment), rollout_shares(deployment)
    if len(trainers) > 1 or len(rollouts) > 1:
        raise ConfigError(
            f"psrl.deployment asks for {len(trainers)} trainer and {len(rollouts)} rollout nodes, but there is a single node: "
            "use train_nnodes=1 and no more instances than rollout_ngpus_per_node has room for, or a job with more nodes."
        )
    return _merged("node-0", trainers + rollouts)


def _merged(name: str, shares: list[Share]) -> Share:
    def joined(ranges: list[range]) -> range:
        return range(min(r.start for r in ranges), max(r.stop for r in ranges))

    return Share(
        name,
        joined([s.ranks for s in shares]),
        joined([s.instances for s in shares]),
        joined([s.validators for s in shares]),
        joined([s.agent_loops for s in shares]),
    )


def shares_of(deployment: DeploymentConfig, group_sizes: tuple[int, ...]) -> list[list[Share]]:
    """Shares by group and node of a job whose groups have `group_sizes` nodes: two groups are trainers and rollouts, one
    group is a single node for everything, or trainers first and rollouts behind them.

    Raises ConfigError if the job's nodes are not those that the deployment asks for.
    """
    if group_sizes == (1,):
        return [[one_node(deployment)]]
    trainers, rollouts = trainer_shares(deployment), rollout_shares(deployment)
    wanted: tuple[int, ...]
    if len(group_sizes) == 1:
        wanted, shares = (len(trainers) + len(rollouts),), [trainers + rollouts]
    else:
        wanted, shares = (len(trainers), len(rollouts)), [trainers, rollouts]
    if group_sizes != wanted:
        raise ConfigError(
            f"the job has {_nodes(group_sizes)}, but psrl.deployment asks for {_nodes(wanted)} "
            f"({len(trainers)} trainer and {len(rollouts)} rollout): make both the same."
        )
    return shares


def _nodes(sizes: tuple[int, ...]) -> str:
    return " + ".join(map(str, sizes)) + (" nodes" if sum(sizes) != 1 else " node")
