"""What a joiner decides before it starts anything."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from psrl.config.schema import Config
from psrl.coordinator.service import LARGEST_FLEET, fleet_limit
from psrl.join import joined_children, joiner_name, role_place
from psrl.rundir.layout import RunDir

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "join-n1-site-4711"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, "join-12-0-3"),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "join-12-2-0"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0"}, "join-12-0-0-s1"),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0"}, "join-12-0-0-p4711"),
    ],
)
def test_names_are_unique_in_a_run(environ: dict[str, str], name: str) -> None:
    assert joiner_name(environ, "n1.site", 4711) == name


def test_names_of_what_joins_carry_the_joiner(tmp_path: Path) -> None:
    specs = joined_children(Config(), RunDir(tmp_path), "join-12-0-3", 2, 1)
    assert [(spec.role, spec.name) for spec in specs] == [
        ("instance", "instance-join-12-0-3-0"),
        ("instance", "instance-join-12-0-3-1"),
        ("agent_loop", "agent-loop-join-12-0-3-0"),
    ]


def test_roles_bind_where_the_run_does() -> None:
    here = role_place("tcp://127.0.0.1:41234", "join-a-1", {"SLURMD_NODENAME": "n7"})
    assert here == {"PSRL_LOCAL": "1", "PSRL_NODE": "local", "PSRL_ATTEMPT": "join-a-1"}
    there = role_place("tcp://10.0.0.7:41234", "join-a-1", {"SLURMD_NODENAME": "n7", "PSRL_LOCAL": "1"})
    assert there == {"PSRL_LOCAL": "0", "PSRL_NODE": "n7", "PSRL_ATTEMPT": "join-a-1"}


def test_open_files_limit_the_fleet() -> None:
    assert fleet_limit(4096) == (4096 - 128) // 5
    assert fleet_limit(2**20) == fleet_limit(resource.RLIM_INFINITY) == LARGEST_FLEET
