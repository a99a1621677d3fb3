"""psrl.deployment as shares of nodes: every rank and instance exactly once, whatever the shape of the job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.config.errors import ConfigError
from psrl.config.schema import DeploymentConfig
from psrl.deployment import one_host, one_node, rollout_nodes, shares_of, total_agent_loops

pytestmark = pytest.mark.unit


def deployment(
    train: tuple[int, int], instances: int, gpus: int = 1, room: int = 8, loops: int = 1
) -> DeploymentConfig:
    return DeploymentConfig(
        train_nnodes=train[0],
        train_ngpus_per_node=train[1],
        n_rollout_instances=instances,
        rollout_ngpus_per_node_per_instance=gpus,
        rollout_ngpus_per_node=room,
        n_agent_loops=loops,
    )


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))
def test_every_part_is_in_exactly_one_share(nodes: int, ranks: int, rollouts: int, each: int, loops: int) -> None:
    d = deployment((nodes, ranks), rollouts * each, room=each, loops=loops)
    plain = [s for shares in shares_of(d, (nodes + rollouts,)) for s in shares] if nodes + rollouts > 1 else []
    het = [s for shares in shares_of(d, (nodes, rollouts)) for s in shares]
    for shares in (plain, het, one_host(d)):
        if not shares:
            continue
        assert sorted(r for s in shares for r in s.ranks) == list(range(nodes * ranks))
        assert sorted(i for s in shares for i in s.instances) == list(range(rollouts * each))
        assert sorted(a for s in shares for a in s.agent_loops) == list(range(total_agent_loops(d)))
        assert [s.leads for s in shares] == [True, *[False] * (len(shares) - 1)]
        assert len({s.name for s in shares}) == len(shares)


def test_the_shapes_of_a_job() -> None:
    d = deployment((2, 4), 4, gpus=2, room=4)
    assert [[s.name for s in group] for group in shares_of(d, (2, 2))] == [
        ["trainer-node-0", "trainer-node-1"],
        ["rollout-node-0", "rollout-node-1"],
    ]
    assert [s.name for s in shares_of(d, (4,))[0]] == [
        "trainer-node-0", "trainer-node-1", "rollout-node-0", "rollout-node-1",
    ]  # fmt: skip
    everything = one_node(deployment((1, 4), 2))
    assert (everything.ranks, everything.instances) == (range(4), range(2))
    assert shares_of(deployment((1, 4), 2), (1,)) == [[everything]]


@pytest.mark.parametrize(
    ("d", "said"),
    [
        (deployment((1, 1), 2, gpus=3, room=8), r"rollout_ngpus_per_node_per_instance=3 does not divide .*node=8"),
        (deployment((1, 1), 2, gpus=8, room=4), r"instance=8 does not divide .*rollout_ngpus_per_node=4"),
        (
            deployment((1, 1), 9),
            r"n_rollout_instances=9 does not divide over 2 rollout nodes of 8 instances: use 8 or 16",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(d: DeploymentConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rollout_nodes(d)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((2, 1), r"the job has 2 \+ 1 nodes, but psrl.deployment asks for 1 \+ 1 nodes"),
        ((3,), r"the job has 3 nodes, but psrl.deployment asks for 2 nodes \(1 trainer and 1 rollout\)"),
    ],
)
def test_a_job_of_another_size_is_refused(sizes: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shares_of(deployment((1, 1), 2), sizes)


def test_a_single_node_cannot_hold_more() -> None:
    with pytest.raises(ConfigError, match="asks for 1 trainer and 2 rollout nodes, but there is a single node"):
        one_node(deployment((1, 1), 2, room=1))
