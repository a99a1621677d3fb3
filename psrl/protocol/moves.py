"""Samples on the move: what an agent loop says of those that leave an instance and asks for those that look for one."""

# ruff: noqa: RUF012 (msgspec copies default lists and dicts for each message)
from __future__ import annotations

from psrl.protocol.message import Message


class SampleMoves(Message):
    """Agent loop -> coordinator: samples that left an instance, as (group, instance, count)."""

    left: list[tuple[int, str, int]]


class RouteRequest(Message):
    """Agent loop -> coordinator: where shall these (group, sample) pairs go on? Answered by Routed, at once or later."""

    samples: list[tuple[int, int]]
    reason: str = ""
    """Why they are on the move: the finish with which their instance handed them back (psrl.protocol.generation), "turn" if
    they are back from their environment with a new turn, "" if their instance was lost. A "migrated" or "preempted" sample is
    bound to no instance, by stickiness of any kind, until it has been placed again."""
    instance: str = ""
    """Where all of them were, "" if that is not known."""
    tokens: list[int] = []
    """Tokens after the group's prompt so far, one for each sample: its response, and what its environment added."""
    blocks: list[list[int]] = []
    """Names of the whole cache blocks of each sample (psrl.protocol.blocks), prompt included; empty where routing does not ask
    for them (psrl.config.cache_blocks)."""


class TurnsEnded(Message):
    """Agent loop -> coordinator: turns of multi-turn samples that ended at an instance. SampleMoves says that they left it."""

    away: list[tuple[int, int, str, int]] = []
    """(group, sample, instance, tokens) of those that are at their environment now and come back with a RouteRequest of reason
    "turn"; `tokens` are all whose keys and values the instance may still hold, the prompt's included."""
    over: list[tuple[int, int, str]] = []
    """(group, sample, instance) of those that come back no more, though their group is still open."""


class Routed(Message):
    """(group, sample, instance) for each; the version there is at least the group's."""

    samples: list[tuple[int, int, str]]
    incarnation: int
