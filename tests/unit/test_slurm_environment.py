"""What an allocation writes into the environment. The environments were recorded on a real Slurm 22.05."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from psrl.config.errors import ConfigError
from psrl.slurm.environment import (
    Group,
    clean_environment,
    inherited_names,
    no_kill_asked,
    place_from_environment,
)

pytestmark = pytest.mark.unit


def recorded(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


PLAIN = recorded("""
SLURMD_NODENAME=n3 SLURM_CLUSTER_NAME=cluster SLURM_CONF=/etc/slurm/slurm.conf SLURM_CPUS_ON_NODE=2
SLURM_CPUS_PER_TASK=2 SLURM_CPU_BIND=quiet,none SLURM_CPU_BIND_LIST= SLURM_CPU_BIND_TYPE=none
SLURM_CPU_BIND_VERBOSE=quiet SLURM_DISTRIBUTION=cyclic SLURM_GTIDS=1 SLURM_JOBID=1 SLURM_JOB_CPUS_PER_NODE=2(x3)
SLURM_JOB_GID=1000 SLURM_JOB_ID=1 SLURM_JOB_NAME=run SLURM_JOB_NODELIST=n[2-4] SLURM_JOB_NUM_NODES=3
SLURM_JOB_PARTITION=rollout SLURM_JOB_UID=1000 SLURM_JOB_USER=user SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_LOCALID=0
SLURM_NNODES=3 SLURM_NODEID=1 SLURM_NODELIST=n[2-4] SLURM_NODE_ALIASES=(null) SLURM_NPROCS=3 SLURM_NTASKS=3
SLURM_NTASKS_PER_NODE=1 SLURM_PRIO_PROCESS=0 SLURM_PROCID=1 SLURM_SRUN_COMM_HOST=127.0.0.1 SLURM_SRUN_COMM_PORT=38991
SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_LAUNCHER_PORT=38991 SLURM_STEP_NODELIST=n[2-4] SLURM_STEP_NUM_NODES=3
SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=1(x3) SLURM_SUBMIT_DIR=/home/user SLURM_SUBMIT_HOST=login
SLURM_TASKS_PER_NODE=1(x3) SLURM_TASK_PID=6444 SLURM_TOPOLOGY_ADDR=n3 SLURM_TOPOLOGY_ADDR_PATTERN=node
SLURM_UMASK=0022 SLURM_WORKING_CLUSTER=cluster:127.0.0.1:6817:9728:109 SRUN_DEBUG=3
""")
"""Task 1 of a step over a plain job of three nodes."""

HET = recorded("""
SLURMD_NODENAME=n3 SLURM_CLUSTER_NAME=cluster SLURM_CONF=/etc/slurm/slurm.conf SLURM_CPUS_ON_NODE=2
SLURM_CPUS_PER_TASK=1 SLURM_CPUS_PER_TASK_HET_GROUP_0=2 SLURM_CPUS_PER_TASK_HET_GROUP_1=1 SLURM_CPU_BIND=quiet,none
SLURM_CPU_BIND_LIST= SLURM_CPU_BIND_TYPE=none SLURM_CPU_BIND_VERBOSE=quiet SLURM_DISTRIBUTION=cyclic
SLURM_GPUS_ON_NODE=2 SLURM_GPUS_PER_NODE_HET_GROUP_0=2 SLURM_GTIDS=0 SLURM_HET_SIZE=2 SLURM_JOBID=14
SLURM_JOB_CPUS_PER_NODE=1(x2),2(x2) SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0=2(x2)
SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1=1(x2) SLURM_JOB_GID=1000 SLURM_JOB_ID=14 SLURM_JOB_ID_HET_GROUP_0=14
SLURM_JOB_ID_HET_GROUP_1=15 SLURM_JOB_NAME=run SLURM_JOB_NODELIST=c5,n[2-4] SLURM_JOB_NODELIST_HET_GROUP_0=n[3-4]
SLURM_JOB_NODELIST_HET_GROUP_1=c5,n2 SLURM_JOB_NUM_NODES=4 SLURM_JOB_NUM_NODES_HET_GROUP_0=2
SLURM_JOB_NUM_NODES_HET_GROUP_1=2 SLURM_JOB_PARTITION=rollout SLURM_JOB_PARTITION_HET_GROUP_0=rollout
SLURM_JOB_PARTITION_HET_GROUP_1=rollout SLURM_JOB_UID=1000 SLURM_JOB_USER=user SLURM_LAUNCH_NODE_IPADDR=127.0.0.1
SLURM_LOCALID=0 SLURM_NNODES=4 SLURM_NODEID=0 SLURM_NODELIST=c5,n[2-4] SLURM_NODE_ALIASES=(null) SLURM_NPROCS=4
SLURM_NPROCS_HET_GROUP_0=2 SLURM_NPROCS_HET_GROUP_1=2 SLURM_NTASKS=4 SLURM_NTASKS_HET_GROUP_0=2
SLURM_NTASKS_HET_GROUP_1=2 SLURM_NTASKS_PER_NODE=1 SLURM_NTASKS_PER_NODE_HET_GROUP_0=1
SLURM_NTASKS_PER_NODE_HET_GROUP_1=1 SLURM_PRIO_PROCESS=0 SLURM_PROCID=0 SLURM_RESTART_COUNT=1
SLURM_SRUN_COMM_HOST=127.0.0.1 SLURM_SRUN_COMM_PORT=37373 SLURM_STEPID=0 SLURM_STEP_ID=0
SLURM_STEP_LAUNCHER_PORT=37373 SLURM_STEP_NODELIST=c5,n[2-4] SLURM_STEP_NUM_NODES=4 SLURM_STEP_NUM_TASKS=4
SLURM_STEP_TASKS_PER_NODE=1(x4) SLURM_SUBMIT_DIR=/home/user SLURM_SUBMIT_HOST=login SLURM_TASKS_PER_NODE=1(x4)
SLURM_TASKS_PER_NODE_HET_GROUP_0=1(x2) SLURM_TASKS_PER_NODE_HET_GROUP_1=1(x2) SLURM_TASK_PID=13538
SLURM_TOPOLOGY_ADDR=n3 SLURM_TOPOLOGY_ADDR_PATTERN=node SLURM_UMASK=0022
SLURM_WORKING_CLUSTER=cluster:127.0.0.1:6817:9728:109 SRUN_DEBUG=3
""")
"""Task 0 of a requeued job's step over both groups; the union's first node is not the first group's."""

HET_TASKS = (
    {"SLURM_PROCID": "0", "SLURMD_NODENAME": "n3", "SLURM_NODEID": "0"},
    {"SLURM_PROCID": "1", "SLURMD_NODENAME": "n4", "SLURM_NODEID": "1"},
    {"SLURM_PROCID": "2", "SLURMD_NODENAME": "c5", "SLURM_NODEID": "2"},
    {"SLURM_PROCID": "3", "SLURMD_NODENAME": "n2", "SLURM_NODEID": "3"},
)
"""What the place of each task changes."""


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# --- submission


def test_nothing_of_an_allocation_reaches_a_submission_but_where_the_cluster_is() -> None:
    hostile = {
        "SLURM_ARRAY_JOB_ID": "999",
        "SLURM_NTASKS": "7",
        "SBATCH_PARTITION": "nope",
        "SALLOC_QOS": "x",
        "SRUN_CPUS_PER_TASK": "3",
        "SUBMITIT_EXECUTOR": "slurm",
        "PMI_RANK": "0",
        "PMI2_FD": "9",
        "PMIX_NAMESPACE": "x",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "PSRL_ATTEMPT": "1-0",
        "PSRL_NODE": "n1",
        "PSRL_LOCAL": "1",
        "PSRL_GENERATION": "2",
        "PSRL_SIGNAL_DELAY_S": "90",
        "CUDA_VISIBLE_DEVICES": "3",
        "ROCR_VISIBLE_DEVICES": "3",
        "GPU_DEVICE_ORDINAL": "3",
    }
    own = {
        "PATH": "/usr/bin",
        "HOME": "/home/user",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "WANDB_API_KEY": "secret",
        "PSRL_NODE_LOCAL": "/scratch",
        "CUDA_HOME": "/usr/local/cuda",
        "MY_SLURM_NOTE": "x",
        "FRANK": "x",
        "PMIDNIGHT": "x",
    }
    environ = PLAIN | HET | hostile | own
    assert clean_environment(environ) == own
    assert inherited_names(environ) == sorted(environ.keys() - own.keys())
    assert inherited_names(own) == []


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        ({"SBATCH_NO_KILL": ""}, "SBATCH_NO_KILL"),
        ({"SBATCH_NO_KILL": "set"}, "SBATCH_NO_KILL"),
        ({"SLURM_NO_KILL": "1"}, "SLURM_NO_KILL"),
        ({"SBATCH_NO_KILL": "off", "SLURM_NO_KILL": "yes"}, "SLURM_NO_KILL"),
        ({"SBATCH_NO_KILL": "OFF", "SLURM_NO_KILL": "no"}, None),
        ({"SLURM_KILL_BAD_EXIT": "1"}, None),
    ],
)
def test_the_variable_that_asks_for_no_kill_is_named(environ: dict[str, str], name: str | None) -> None:
    assert no_kill_asked(environ) == name


# --- the place of a task


def test_a_task_of_a_plain_job() -> None:
    place = place_from_environment(PLAIN)
    assert (place.job_id, place.restart_count, place.procid, place.hostname) == (1, 0, 1, "n3")
    assert place.groups == (Group(3, ("n2", "n3", "n4")),)
    assert (place.group, place.index) == (0, 1)


@pytest.mark.parametrize(("task", "group", "index"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)])
def test_the_tasks_of_a_heterogeneous_job(task: int, group: int, index: int) -> None:
    place = place_from_environment(HET | HET_TASKS[task])
    assert place.groups == (Group(2, ("n3", "n4")), Group(2, ("c5", "n2")))
    assert (place.group, place.index) == (group, index)
    assert place.groups[group].nodes[index] == place.hostname == HET_TASKS[task]["SLURMD_NODENAME"]
    assert (place.job_id, place.restart_count) == (14, 1)


def test_groups_without_a_number_of_tasks_have_one_a_node() -> None:
    """A batch script without --ntasks or --ntasks-per-node leaves these variables out."""
    environ = without(HET, "SLURM_NTASKS_HET_GROUP_0", "SLURM_NTASKS_HET_GROUP_1")
    assert place_from_environment(environ) == place_from_environment(HET)


def test_the_partition_decides_nothing() -> None:
    names = [name for name in HET if name.startswith("SLURM_JOB_PARTITION")]
    assert len(names) == 3
    assert place_from_environment(without(HET, *names)) == place_from_environment(HET)


TWO_A_NODE = HET | {"SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "1(x2),2(x2)"}
"""srun --ntasks-per-node=2 for the second group: the groups' own variables stay those of the allocation."""
SECOND_GROUP_ONLY = (
    HET
    | HET_TASKS[2]
    | {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_NODELIST": "c5,n2",
    }
)
"""srun --het-group=1."""
ALL_NODES = "start one task a node over all groups, with `srun --ntasks-per-node=1` in a batch script."


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (TWO_A_NODE, f"SLURM_STEP_NUM_TASKS=6 is not the number of the job's nodes, 4: {ALL_NODES}"),
        (SECOND_GROUP_ONLY, f"SLURM_STEP_NUM_TASKS=2 is not the number of the job's nodes, 4: {ALL_NODES}"),
        (
            HET | {"SLURM_NTASKS_HET_GROUP_1": "4", "SLURM_STEP_NUM_TASKS": "6"},
            f"Group 1 of the job has 4 tasks on 2 nodes (c5, n2): {ALL_NODES}",
        ),
        (
            PLAIN | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "6"},
            f"Group 0 of the job has 6 tasks on 3 nodes (n2, n3, n4): {ALL_NODES}",
        ),
        (
            without(PLAIN, "SLURM_STEP_NUM_TASKS"),
            f"SLURM_STEP_NUM_TASKS is not set, so this is not a task of a job step: {ALL_NODES}",
        ),
        (
            without(HET, "SLURM_JOB_NODELIST_HET_GROUP_0"),
            f"SLURM_JOB_NODELIST_HET_GROUP_0 is not set, so this is not a task of a job step: {ALL_NODES}",
        ),
        (
            PLAIN | {"SLURM_JOB_NODELIST": ""},
            f"SLURM_JOB_NODELIST is not set, so this is not a task of a job step: {ALL_NODES}",
        ),
        (PLAIN | {"SLURM_PROCID": "one"}, f"SLURM_PROCID=one is refused: Slurm writes a number there; {ALL_NODES}"),
        (
            PLAIN | {"SLURMD_NODENAME": "n4"},
            "SLURM_PROCID=1 belongs on n3 but runs on n4: the step's tasks do not follow the node lists; "
            "start srun without SLURM_HOSTFILE and --distribution=arbitrary.",
        ),
    ],
)
def test_any_other_step_is_refused_in_one_sentence(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place_from_environment(environ)
    assert str(caught.value) == sentence
