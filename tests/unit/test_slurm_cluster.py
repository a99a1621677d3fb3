"""What the cluster offers, and which requests it cannot take."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from psrl.config.errors import ConfigError
from psrl.slurm.cluster import NodeSize, Partition, check_request, parse_cluster, read_cluster

pytestmark = pytest.mark.unit

PARTITIONS = """\
PartitionName=train AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=00:30:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=1-12:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[1-2] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=16 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=16,mem=10000M,node=2,billing=16
PartitionName=rollout AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=c5,n[2-4] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=20 TotalNodes=4 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=19,mem=16000M,node=4,billing=19
PartitionName=old AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=YES MaxNodes=1 MaxTime=00:30:00 MinNodes=0 LLN=NO MaxCPUsPerNode=3 Nodes=c5 PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=DRAIN TotalCPUs=4 TotalNodes=1 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=2000 TRES=cpu=4,mem=3000M,node=1,billing=4
PartitionName=gone AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n1 PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=DOWN TotalCPUs=8 TotalNodes=1 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=8,mem=5000M,node=1,billing=8
PartitionName=empty AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=(null) PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=0 TotalNodes=0 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=(null)
"""
"""`scontrol --all show partition -o` of a real Slurm 22.05."""

NODES = """\
NodeName=c5 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=2.99 AvailableFeatures=(null) ActiveFeatures=(null) Gres=(null) NodeAddr=127.0.0.1 NodeHostName=host Port=27825 Version=22.05.8 OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=3000 AllocMem=0 FreeMem=21508 Sockets=4 Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=rollout,old  BootTime=2026-11-29T21:40:19 SlurmdStartTime=2026-11-29T21:47:23 LastBusyTime=2026-11-29T21:54:54 CfgTRES=cpu=4,mem=3000M,billing=4 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
NodeName=n1 Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=2.99 AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:h100:4(S:0-1) NodeAddr=127.0.0.1 NodeHostName=host Port=27821 Version=22.05.8 OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=5000 AllocMem=0 FreeMem=21508 Sockets=2 Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=train,gone  BootTime=2026-11-29T21:40:19 SlurmdStartTime=2026-11-29T21:47:23 LastBusyTime=2026-11-29T21:54:54 CfgTRES=cpu=8,mem=5000M,billing=8 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
NodeName=n2 Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=2.99 AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:h100:4(S:0-1) NodeAddr=127.0.0.1 NodeHostName=host Port=27822 Version=22.05.8 OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=5000 AllocMem=0 FreeMem=21508 Sockets=2 Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=train,rollout  BootTime=2026-11-29T21:40:19 SlurmdStartTime=2026-11-29T21:47:23 LastBusyTime=2026-11-29T22:02:05 CfgTRES=cpu=8,mem=5000M,billing=8 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
NodeName=n3 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=2.99 AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:a100:2,mps:a100:200 NodeAddr=127.0.0.1 NodeHostName=host Port=27823 Version=22.05.8 OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=21508 Sockets=4 Boards=1 State=IDLE+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=rollout  BootTime=2026-11-29T21:40:19 SlurmdStartTime=2026-11-29T21:47:23 LastBusyTime=2026-11-29T22:02:05 CfgTRES=cpu=4,mem=4000M,billing=4 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s Reason=was CPUTot=1 and Gres=gpu:9 (fan) [root@2026-11-29T22:03:30]
NodeName=n4 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=3 CPUTot=4 CPULoad=2.99 AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:a100:2,mps:a100:200 NodeAddr=127.0.0.1 NodeHostName=host Port=27824 Version=22.05.8 OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=21508 Sockets=4 Boards=1 CoreSpecCount=1 CPUSpecList=3 MemSpecLimit=500 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=rollout  BootTime=2026-11-29T21:40:19 SlurmdStartTime=2026-11-29T21:54:50 LastBusyTime=2026-11-29T22:02:05 CfgTRES=cpu=3,mem=4000M,billing=3 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
"""
"""`scontrol --all show node -o` there: n4 keeps a CPU and 500 MB for the system, the note on n3 looks like fields."""

CLUSTER = parse_cluster(PARTITIONS, NODES)

H100_NODE = NodeSize(cpus=8, gpus=4, memory_mb=5000)
A100_NODE = NodeSize(cpus=4, gpus=2, memory_mb=4000)


# --- what scontrol prints


def test_partitions_are_read_with_the_limits_of_their_nodes() -> None:
    assert parse_cluster(PARTITIONS, NODES) == {
        "train": Partition(
            name="train",
            state="UP",
            is_default=True,
            max_time_s=129_600,
            default_time_s=1800,
            max_nodes=None,
            sizes=(H100_NODE, H100_NODE),
        ),
        "rollout": Partition(
            name="rollout",
            state="UP",
            is_default=False,
            max_time_s=None,
            default_time_s=None,
            max_nodes=None,
            sizes=(
                NodeSize(cpus=4, gpus=0, memory_mb=3000),
                H100_NODE,
                A100_NODE,
                NodeSize(cpus=3, gpus=2, memory_mb=3500),
            ),
        ),
        "old": Partition(
            name="old",
            state="DRAIN",
            is_default=False,
            max_time_s=1800,
            default_time_s=None,
            max_nodes=1,
            sizes=(NodeSize(cpus=3, gpus=0, memory_mb=2000),),
        ),
        "gone": Partition(
            name="gone",
            state="DOWN",
            is_default=False,
            max_time_s=None,
            default_time_s=None,
            max_nodes=None,
            sizes=(H100_NODE,),
        ),
        "empty": Partition(
            name="empty",
            state="UP",
            is_default=False,
            max_time_s=None,
            default_time_s=None,
            max_nodes=None,
            sizes=(),
        ),
    }


@pytest.mark.parametrize(
    ("name", "nodes", "cpus", "gpus", "memory_mb"),
    [("train", 2, 8, 4, 5000), ("rollout", 4, 3, 0, 3000), ("empty", 0, 0, 0, 0)],
)
def test_a_partition_has_per_node_what_its_smallest_node_has(
    name: str, nodes: int, cpus: int, gpus: int, memory_mb: int
) -> None:
    found = CLUSTER[name]
    assert (found.nodes, found.cpus_per_node, found.gpus_per_node, found.memory_mb) == (nodes, cpus, gpus, memory_mb)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", 0),
        ("", 0),
        ("gpu:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:h100:4(S:0),gpu:h100:4(S:1)", 8),
        ("gpu:a100:4(S:0,2),mps:a100:400", 4),
        ("nic:2,gpu:l40s:1,gpu:t4:2,shard:12", 3),
        ("gpu", 1),
        ("gpu_memory:80", 0),
    ],
)
def test_gpus_are_counted_in_generic_resources(gres: str, gpus: int) -> None:
    nodes = NODES.replace("Gres=gpu:h100:4(S:0-1)", f"Gres={gres}")
    assert [size.gpus for size in parse_cluster(PARTITIONS, nodes)["train"].sizes] == [gpus, gpus]


def test_a_controller_that_does_not_tell_usable_cpus_tells_all_of_them() -> None:
    nodes = NODES.replace("CPUEfctv=3 ", "").replace("CPUEfctv=4 ", "")
    assert [size.cpus for size in parse_cluster(PARTITIONS, nodes)["rollout"].sizes] == [4, 8, 4, 4]


# --- requests


def check(cluster: dict[str, Partition] = CLUSTER, **asked: object) -> None:
    request = {
        "key": "hydra.launcher.rollout",
        "partition": "rollout",
        "nodes": 2,
        "cpus_per_node": 2,
        "gpus_per_node": 0,
        "memory_mb": None,
        "time_s": 3600,
    }
    check_request(cluster, **request | asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"partition": None},
        {"partition": "train,rollout"},
        {"nodes": 4, "cpus_per_node": 3, "memory_mb": 3000},
        {"nodes": 3, "gpus_per_node": 2, "cpus_per_node": 3, "memory_mb": 3500},
        {"nodes": 1, "gpus_per_node": 4, "cpus_per_node": 8, "memory_mb": 5000},
        {"time_s": None},
        {"partition": "train", "time_s": 129_600},
        {"partition": "train", "time_s": 129_599},
    ],
)
def test_what_fits_is_accepted_up_to_the_last_unit(asked: dict[str, object]) -> None:
    check(**asked)


NO_PARTITION = ", since no partition takes this request."


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"partition": "gpu"},
            ".partition=gpu is refused: there is no partition 'gpu'; "
            "name one of this cluster's partitions (train, rollout, old, gone, empty).",
        ),
        (
            {"partition": "train,"},
            ".partition=train, is refused: there is no partition ''; "
            "name one of this cluster's partitions (train, rollout, old, gone, empty).",
        ),
        (
            {"partition": "old", "nodes": 1},
            ".partition=old is refused: its state is DRAIN, so it starts no job; wait until it is UP, "
            "or use partition train or rollout.",
        ),
        (
            {"partition": "empty", "nodes": 4},
            ".partition=empty is refused: it has no nodes; choose another, or use partition rollout.",
        ),
        (
            {"partition": None, "nodes": 3},
            ".nodes=3 is refused: partition train has 2; ask for at most 2, or use partition rollout.",
        ),
        (
            {"nodes": 5},
            ".nodes=5 is refused: partition rollout has 4; ask for at most 4" + NO_PARTITION,
        ),
        (
            {"partition": "rollout,train", "nodes": 3},
            ".nodes=3 is refused: partition train has 2; ask for at most 2, or use partition rollout.",
        ),
        (
            {"gpus_per_node": 3},
            ".gpus_per_node=3 is refused: partition rollout has no 2 nodes with more than 2; ask for at most 2, "
            "or use partition train.",
        ),
        (
            {"nodes": 1, "cpus_per_node": 9},
            ".cpus_per_task=9 is refused: partition rollout has no node with more than 8; ask for at most 8"
            + NO_PARTITION,
        ),
        (
            {"nodes": 3, "gpus_per_node": 2, "cpus_per_node": 4},
            ".cpus_per_task=4 is refused: partition rollout has no 3 nodes with gpus_per_node=2 and more than 3; "
            "ask for at most 3" + NO_PARTITION,
        ),
        (
            {"memory_mb": 4001},
            ".mem_gb=3.90723 is refused: partition rollout has no 2 nodes with cpus_per_task=2 and more than 3.90625; "
            "ask for at most 3.90625, or use partition train.",
        ),
        (
            {"partition": "train", "time_s": 129_601},
            ".time=1-12:00:01 is refused: partition train has MaxTime 1-12:00:00; ask for at most 1-12:00:00, "
            "or use partition rollout.",
        ),
        (
            {"partition": "train", "time_s": None},
            ".time=UNLIMITED is refused: partition train has MaxTime 1-12:00:00; ask for at most 1-12:00:00, "
            "or use partition rollout.",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(asked: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(**asked)
    assert str(caught.value) == f"hydra.launcher.rollout{sentence}"


def test_most_nodes_of_a_job_may_be_fewer_than_the_partition_has() -> None:
    cluster = parse_cluster(PARTITIONS.replace("MaxNodes=UNLIMITED", "MaxNodes=3", 2), NODES)
    with pytest.raises(
        ConfigError, match="nodes=4 is refused: partition rollout has MaxNodes 3 for a job; ask for at most 3, since"
    ):
        check(cluster, nodes=4)
    check(cluster, nodes=3)


def test_a_limit_is_compared_in_whole_minutes_as_slurm_counts_it() -> None:
    cluster = parse_cluster(PARTITIONS.replace("MaxTime=1-12:00:00", "MaxTime=00:10:30"), NODES)
    check(cluster, partition="train", time_s=600)
    with pytest.raises(ConfigError, match="time=00:10:01 is refused: partition train has MaxTime 00:10:30"):
        check(cluster, partition="train", time_s=601)


def test_without_a_default_partition_one_must_be_named() -> None:
    cluster = parse_cluster(PARTITIONS.replace("Default=YES", "Default=NO"), NODES)
    with pytest.raises(ConfigError) as caught:
        check(cluster, partition=None)
    assert str(caught.value) == (
        "hydra.launcher.rollout.partition=null is refused: this cluster has no default partition; "
        "name one of its partitions (train, rollout, old, gone, empty)."
    )


# --- asking scontrol


def put_scontrol(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    """A stand-in on PATH, for answers that a real controller gives on a bad day only."""
    command = directory / "scontrol"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_partitions_are_asked_for_outside_of_any_allocation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "partition").write_text(PARTITIONS)
    (tmp_path / "node").write_text(NODES)
    put_scontrol(
        monkeypatch,
        tmp_path,
        f'[ "$1 $2 $3 $SLURM_CLUSTERS" = "--all --oneliner show " ] && exec cat {tmp_path}/"$4"',
    )
    monkeypatch.setenv("SLURM_CLUSTERS", "another")
    assert read_cluster() == (CLUSTER, "")


def test_without_scontrol_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_cluster() == (None, "there is no scontrol on this host")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo slurm_load_partitions error: Unable to contact slurm controller >&2; exit 1",
         "scontrol failed: slurm_load_partitions error: Unable to contact slurm controller"),
        ("exit 3", "scontrol failed: exit code 3"),
        ("exec sleep 60", "scontrol had no answer from the Slurm controller within 0.5 s"),
        ("[ $4 = node ] && exec sleep 60", "scontrol had no answer from the Slurm controller within 0.5 s"),
    ],
)  # fmt: skip
def test_an_unreachable_controller_is_told_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    put_scontrol(monkeypatch, tmp_path, f"{script}\ntrue")
    started = time.monotonic()
    assert read_cluster(timeout_s=0.5 if "sleep" in script else 60.0) == (None, reason)
    assert time.monotonic() - started < 10


@pytest.mark.slurm
@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's client commands")
def test_the_real_scontrol_without_a_controller_does_not_outlast_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By itself it tries for 9 s, and for 60 s if it cannot read its configuration."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nSlurmctldPort=1\n")
    for path in (conf, tmp_path / "missing.conf"):
        monkeypatch.setenv("SLURM_CONF", str(path))
        started = time.monotonic()
        assert read_cluster(timeout_s=1) == (None, "scontrol had no answer from the Slurm controller within 1 s")
        assert time.monotonic() - started < 5
