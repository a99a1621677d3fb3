"""A Slurm cluster for this test session (one for each xdist worker)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mini_cluster import MiniSlurm, mini_cluster


@pytest.fixture(scope="session")
def mini_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    """Four nodes: n1 and n2 in `train`, n3 and n4 in `rollout`. Jobs that a test leaves behind go on: `end_jobs` ends them."""
    with mini_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
