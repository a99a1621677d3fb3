"""The tree along which the first weights of a run spread over its nodes (`psrl.broadcast_init`). Pure.

Nodes are numbered as they come. The first ones read from the trainers, each later one from a node before it. So nobody has to
know who else will come, the tree has no circles, and a node that is gone concerns only those that read from it.
"""

from __future__ import annotations

FANOUT = 3
"""Nodes that read from one source. They share its link, so that each of the log(nodes) / log(FANOUT) levels takes as long as FANOUT
transfers: in all that is least for 2.7."""

TRAINERS = -1


def source_of(number: int, fanout: int = FANOUT) -> int:
    """The node that node `number` reads from, or TRAINERS.

    >>> [source_of(number, fanout=2) for number in range(7)]
    [-1, -1, 0, 0, 1, 1, 2]
    """
    return number // fanout - 1
