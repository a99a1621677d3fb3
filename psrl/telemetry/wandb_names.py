"""What a run is called in Weights & Biases, and how the members of a sweep are told apart there. Pure but for `run.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psrl.config.flat import flatten
from psrl.telemetry.members import Member, short_keys, sweep_members

LONGEST_TAG = 64
"""W&B refuses longer ones."""


def settings_in_sweep(member: Member) -> dict[str, str]:
    """Key to value of what this member of a sweep differs in from the others that are there; all that was set for it as
    long as it is the only one."""
    if not member.sweep:
        return {}
    found = [m.settings for m in sweep_members(member.path.parent) if m.path == member.path]
    return dict((found[0] if found else {}) or member.overrides)


def display_name(member: Member, settings: Mapping[str, str]) -> str:
    """`3-staleness=1-lr=1e-6` for a member of a sweep, else the run directory's name."""
    if member.number is None:
        return member.path.name
    return "-".join([str(member.number), *(f"{name}={value}" for name, value in shortened(settings))])


def tags(settings: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}"[:LONGEST_TAG] for name, value in shortened(settings)]


def sweep_config(settings: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Any]:
    """`sweep/<key>` for each setting, with the typed value where the configuration has one: W&B can group by it."""
    typed = flatten(dict(config))
    return {f"sweep/{key}": typed.get(key, value) for key, value in settings.items()}


def shortened(settings: Mapping[str, str]) -> list[tuple[str, str]]:
    """(short key, value) of each setting."""
    short = short_keys(list(settings))
    return [(short[key], value or "default") for key, value in settings.items()]
