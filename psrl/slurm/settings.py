"""`hydra.launcher.*` of `hydra/launcher=submitit_slurm`: the names of hydra-submitit-launcher, and what a het job adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

from psrl.config.errors import ConfigError
from psrl.slurm.time_limit import parse_time_limit

JOBS = ("het", "plain", "single_node")


@dataclass
class GroupConf:
    """One group of the job; null everywhere: as the key of the same name without the group says."""

    partition: str | None = None
    """Partition of this group's nodes."""
    nodes: int | None = None
    """Must be what psrl.deployment gives; only for those who like to see it in the command."""
    gpus_per_node: int | None = None
    """GPUs a node; null: those that psrl.deployment uses, none where the partition has none."""
    cpus_per_task: int | None = None
    """CPUs a node (there is one task a node); null: 8 for each rank or instance, at most what the node has."""
    mem_gb: int | None = None
    """Memory a node; null: the site's default."""
    timeout_min: int | None = None
    """Time limit in minutes."""
    time: str | None = None
    """Time limit as Slurm writes it, for example 1-12:00:00; wins over timeout_min."""
    constraint: str | None = None
    """Node features."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    gres: str | None = None
    """Other generic resources."""
    exclude: str | None = None
    """Nodes to avoid."""
    sbatch: list[str] = field(default_factory=list)
    """More directives for this group, each as behind `#SBATCH `, for example "--exclusive"."""


@dataclass
class SlurmConf(SlurmQueueConf):
    """One job a sweep member. A group's own settings win over these. Fields of the stock class are here again for their
    meaning; those that have none here are refused."""

    _target_: str = "hydra_plugins.psrl_slurm_launcher.SlurmLauncher"
    name: str = "psrl"
    """Job name; the member's number is added."""
    partition: str | None = None
    """Partition of both groups; null: the cluster's default."""
    timeout_min: int = 60
    """Time limit in minutes."""
    time: str | None = None
    """Time limit as Slurm writes it, for example 1-12:00:00; wins over timeout_min."""
    gpus_per_node: int | None = None
    """GPUs a node; null: those that psrl.deployment uses, none where the partition has none."""
    cpus_per_task: int | None = None
    """CPUs a node (there is one task a node); null: 8 for each rank or instance, at most what the node has."""
    mem_gb: int | None = None
    """Memory a node; null: the site's default."""
    mem_per_gpu: str | None = None
    """Memory for each GPU, as Slurm writes it."""
    mem_per_cpu: str | None = None
    """Memory for each CPU, as Slurm writes it."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features."""
    gres: str | None = None
    """Other generic resources."""
    exclude: str | None = None
    """Nodes to avoid."""
    comment: str | None = None
    """Comment of the job."""
    additional_parameters: dict[str, Any] = field(default_factory=dict)
    """More directives by name, for example {mail-type: END}."""
    setup: list[str] | None = None
    """Shell lines before srun, for example module load cuda."""
    signal_delay_s: int = 120
    """How long before the time limit the run is warned, to drain and requeue."""
    stderr_to_stdout: bool = True
    """One log a job; False: a second one for errors."""
    submitit_folder: str = "${hydra.sweep.dir}/.submitit/%j"
    """Where the scripts are kept as they were submitted."""
    trainer: GroupConf = field(default_factory=GroupConf)
    """Het group 0: the trainer nodes."""
    rollout: GroupConf = field(default_factory=GroupConf)
    """Het group 1: the rollout nodes."""
    job: str = "het"
    """het: a component for each group | plain: one component, trainers first | single_node: everything on one node."""
    max_parallel_jobs: int | None = None
    """Most members that run at the same time (by dependencies between the jobs); null: no limit."""
    max_requeues: int = 100
    """How often a drained run (preempted, time limit) requeues itself."""
    wait: bool = False
    """False: return after submission | True: stay until every run has a verdict."""
    dry_run: bool = False
    """Print what would be submitted, submit nothing, write nothing."""
    sbatch: list[str] = field(default_factory=list)
    """More directives for all groups, each as behind `#SBATCH `."""
    srun_args: list[str] = field(default_factory=list)
    """More flags of each group's srun, for example --container-image=IMAGE with pyxis."""
    python: str | None = None
    """Shell command that runs Python on a node, for example apptainer exec --nv IMAGE python; null: this interpreter."""
    nodes: int = 1
    """Refused: psrl.deployment decides."""
    tasks_per_node: int = 1
    """Refused: there is one task a node."""
    gpus_per_task: int | None = None
    """Refused: use gpus_per_node."""
    cpus_per_gpu: int | None = None
    """Refused: use cpus_per_task."""
    max_num_timeout: int = 0
    """Refused: use max_requeues."""
    array_parallelism: int = 256
    """Refused: use max_parallel_jobs."""


NOT_USED: dict[str, tuple[Any, str]] = {
    "nodes": (1, "psrl.deployment decides how many nodes each group has"),
    "tasks_per_node": (1, "there is one task a node, which starts the ranks and instances of the node"),
    "gpus_per_task": (None, "it breaks CUDA IPC between the ranks of a node; use gpus_per_node"),
    "cpus_per_gpu": (None, "use cpus_per_task: there is one task a node"),
    "max_num_timeout": (0, "use max_requeues"),
    "array_parallelism": (256, "a heterogeneous job cannot be an array; use max_parallel_jobs"),
}
"""Keys of the stock launcher that mean nothing here: (stock default, what to do)."""
REFUSED_FLAGS = {
    "--no-kill": "a lost node would leave half of a heterogeneous job behind, which then never starts again",
    "-k": "a lost node would leave half of a heterogeneous job behind, which then never starts again",
    "--array": "a heterogeneous job cannot be an array; the sweep's members are jobs of their own",
    "-a": "a heterogeneous job cannot be an array; the sweep's members are jobs of their own",
    "--no-requeue": "set hydra.launcher.max_requeues=0 to switch requeueing off",
    "--wrap": "the job's command is psrl's own",
    "--gpus-per-task": "it breaks CUDA IPC between the ranks of a node; use gpus_per_node",
    "--ntasks-per-node": "there is one task a node, which starts the ranks and instances of the node",
    "--signal": "use hydra.launcher.signal_delay_s",
}


def check_settings(conf: SlurmConf) -> None:
    """Refuse what cannot be submitted, whatever the cluster is. Raises ConfigError with one sentence."""
    for key, (default, hint) in NOT_USED.items():
        if getattr(conf, key) != default:
            raise ConfigError(f"hydra.launcher.{key}={getattr(conf, key)} is refused: {hint}.")
    if conf.job not in JOBS:
        raise ConfigError(f"hydra.launcher.job={conf.job} is refused: allowed is {' | '.join(JOBS)}.")
    if conf.max_parallel_jobs is not None and conf.max_parallel_jobs < 1:
        raise ConfigError(
            f"hydra.launcher.max_parallel_jobs={conf.max_parallel_jobs} is refused: it must be at least 1, or null for no limit."
        )
    if conf.max_requeues < 0:
        raise ConfigError(f"hydra.launcher.max_requeues={conf.max_requeues} is refused: it must be at least 0.")
    for prefix, flags in (
        ("sbatch", conf.sbatch),
        ("trainer.sbatch", conf.trainer.sbatch),
        ("rollout.sbatch", conf.rollout.sbatch),
        ("additional_parameters", [f"--{key.replace('_', '-')}" for key in conf.additional_parameters]),
        ("srun_args", conf.srun_args),
    ):
        for flag in flags:
            name = flag.split()[0].partition("=")[0] if flag.split() else ""
            if not name.startswith("-"):
                raise ConfigError(f"hydra.launcher.{prefix} has {flag!r}: each entry is a flag as in --exclusive.")
            if name in REFUSED_FLAGS:
                raise ConfigError(f"hydra.launcher.{prefix} has {flag}: {REFUSED_FLAGS[name]}.")
    for group in ("trainer", "rollout"):
        limit_s = time_limit_s(conf, group)
        if limit_s is not None and not 10 <= conf.signal_delay_s <= limit_s / 2:
            raise ConfigError(
                f"hydra.launcher.signal_delay_s={conf.signal_delay_s} is refused: it must be at least 10 and at most half of "
                f"the time limit ({limit_s} s), so that the run trains between two requeues."
            )


def time_limit_s(conf: SlurmConf, group: str) -> int | None:
    """Time limit of a group in seconds, None for no limit."""
    own: GroupConf = getattr(conf, group)
    for prefix, level in ((f"{group}.", own), ("", conf)):
        if level.time is not None:
            return parse_time_limit(level.time, key=f"hydra.launcher.{prefix}time")
        if level.timeout_min is not None:
            if level.timeout_min < 1:
                raise ConfigError(
                    f"hydra.launcher.{prefix}timeout_min={level.timeout_min} is refused: it is a number of minutes, at least 1."
                )
            return 60 * level.timeout_min
    return None
