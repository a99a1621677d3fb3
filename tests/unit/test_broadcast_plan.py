"""Who passes the first weights on to whom."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.weights.broadcast import FANOUT, PATIENCE_S, TRAINERS, source_of, worth_waiting

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("fanout", "sources"),
    [
        (1, [TRAINERS, 0, 1, 2, 3]),
        (2, [TRAINERS, TRAINERS, 0, 0, 1, 1, 2, 2]),
        (3, [TRAINERS, TRAINERS, TRAINERS, 0, 0, 0, 1]),
    ],
)
def test_the_first_read_from_the_trainers_and_the_others_from_those_before(fanout: int, sources: list[int]) -> None:
    assert [source_of(number, fanout) for number in range(len(sources))] == sources


@given(st.integers(1, 8), st.integers(0, 2000))
def test_nobody_serves_more_than_the_fan_out_and_all_come_from_the_trainers(fanout: int, nodes: int) -> None:
    sources = [source_of(number, fanout) for number in range(nodes)]
    assert all(TRAINERS <= source < number for number, source in enumerate(sources))
    assert max(Counter(sources).values(), default=0) <= fanout


@pytest.mark.parametrize(("nodes", "levels"), [(3, 1), (12, 2), (39, 3), (120, 4), (1092, 6)])
def test_the_tree_is_as_flat_as_it_can_be(nodes: int, levels: int) -> None:
    depth = {TRAINERS: 0}
    for number in range(nodes):
        depth[number] = depth[source_of(number)] + 1
    assert FANOUT == 3 and max(depth.values()) == levels


@pytest.mark.parametrize(
    ("now_s", "heard_s", "worth"),
    [
        (5.0, 5.0, True),
        (5.0 + PATIENCE_S, 5.0, False),  # silent
        (59.0, 58.9, True),
        (60.0, 59.9, False),  # slow: half of 20 ... 100 is over
    ],
)
def test_who_is_silent_or_slow_is_left_for_the_trainers(now_s: float, heard_s: float, worth: bool) -> None:
    assert worth_waiting(now_s, 20.0, heard_s, 100.0) is worth
