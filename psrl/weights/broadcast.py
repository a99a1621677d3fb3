"""The tree along which the first weights of a run spread over its nodes (`psrl.broadcast_init`). Pure.

Nodes are numbered as they come. The first ones read from the trainers, each later one from a node before it. So nobody has to
know who else will come, the tree has no circles, and a node that is gone concerns only those that read from it.
"""

from __future__ import annotations

FANOUT = 3
"""Nodes that read from one source. They share its link, so that each of the log(nodes) / log(FANOUT) levels takes as long as FANOUT
transfers: in all that is least for 2.7."""

TRAINERS = -1
PATIENCE_S = 10.0
"""A node that gives no sign of life, or from which nothing arrives, for so long is left for the trainers."""


def source_of(number: int, fanout: int = FANOUT) -> int:
    """The node that node `number` reads from, or TRAINERS.

    >>> [source_of(number, fanout=2) for number in range(7)]
    [-1, -1, 0, 0, 1, 1, 2]
    """
    return number // fanout - 1


def worth_waiting(now_s: float, begun_s: float, heard_s: float, deadline_s: float) -> bool:
    """Whether a node that was asked at `begun_s` and last heard of at `heard_s` may still take its time. A slow one may, for half of
    what the pull has until its deadline: the rest is for the trainers.

    >>> [worth_waiting(now_s, begun_s=0, heard_s=now_s - 1, deadline_s=100) for now_s in (1, 49, 50)]
    [True, True, False]
    """
    return now_s - heard_s < PATIENCE_S and now_s < (begun_s + deadline_s) / 2
