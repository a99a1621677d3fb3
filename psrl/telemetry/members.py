"""The runs of a sweep: which directories they are and in what they differ, from each `run.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psrl.telemetry.timeline_read import natural

PLACES = ("run_dir", "hydra.")
"""Overrides that say where a member lives, not what it does."""

MAX_NAMED = 4
"""Settings of a member that stand beside its name."""
VAGUE = ("enable", "method", "name", "path", "threshold")
"""Last parts of keys that say nothing without the part before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One run; outside of a sweep it has no number, no sweep and no settings."""

    path: Path
    number: int | None = None
    sweep: str = ""
    """The sweep's id."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Key to value as the user wrote it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The overrides that not all members share; "" where this member leaves the default."""
    created: str = ""
    """ISO time, UTC."""

    @property
    def name(self) -> str:
        return self.path.name if self.number is None else str(self.number)


def find_members(directory: Path) -> list[Member]:
    """The run that `directory` is, or the members of the sweep that it is, in order of their numbers. Empty: neither."""
    if is_run(directory):
        return [read_member(directory)]
    return sweep_members(directory)


def sweep_members(directory: Path) -> list[Member]:
    """Members below `directory` in order, with what they differ in; those without a `run.json` are not there yet.

    Runs that belong to no sweep differ in what their configurations do, so that any runs can be compared."""
    if not directory.is_dir():
        return []
    members = [read_member(path) for path in directory.iterdir() if (path / "run.json").is_file()]
    members.sort(key=lambda member: (member.number is None, member.number, natural(member.path.name)))
    if not any(member.sweep for member in members):  # runs that somebody laid side by side
        members = [replace(member, overrides=_configured(member.path)) for member in members]
    return with_settings(members)


def is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("run.json", "config.yaml"))


def read_member(path: Path) -> Member:
    identity = _json(path / "run.json")
    sweep = identity.get("sweep")
    created = str(identity.get("created", ""))
    if not isinstance(sweep, dict):
        return Member(path=path, created=created)
    return Member(
        path=path,
        number=sweep.get("number"),
        sweep=str(sweep.get("id", "")),
        overrides=_parsed(sweep.get("overrides") or []),
        created=created,
    )


def with_settings(members: Sequence[Member]) -> list[Member]:
    """`settings` of each: the keys, in the order of the command line, whose value not all share."""
    keys = dict.fromkeys(key for member in members for key in member.overrides)
    differing = [key for key in keys if len({member.overrides.get(key) for member in members}) > 1]
    return [replace(member, settings={key: member.overrides.get(key, "") for key in differing}) for member in members]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Each key with as few of its last parts as tell it from the others and mean something.

    `short_keys(["psrl.staleness", "psrl.lmcache.enable"]) == {"psrl.staleness": "staleness", ...: "lmcache.enable"}`
    """
    short = {}
    for key in keys:
        parts = key.split(".")
        least = min(2 if parts[-1] in VAGUE else 1, len(parts))
        tails = (".".join(parts[-length:]) for length in range(least, len(parts) + 1))
        short[key] = next(t for t in tails if t == key or sum(f".{other}".endswith(f".{t}") for other in keys) == 1)
    return short


def settings_text(settings: Mapping[str, str]) -> str:
    """`settings_text({"psrl.staleness": "1", "optim.lr": ""}) == "staleness=1 lr=default"`; nothing where that would be more than
    a sentence has room for: the member's name must do."""
    if len(settings) > MAX_NAMED:
        return ""
    short = short_keys(list(settings))
    return " ".join(f"{short[key]}={value or 'default'}" for key, value in settings.items())


def _parsed(overrides: Sequence[str]) -> dict[str, str]:
    """Key to value; `+key=1` and `++key=1` set the key, `~key` takes it away."""
    parsed = {}
    for override in overrides:
        key, _, value = str(override).lstrip("+").partition("=")
        if not key.startswith(PLACES):
            parsed[key.lstrip("~")] = "removed" if key.startswith("~") else value
    return parsed


def _configured(path: Path) -> dict[str, str]:
    """The whole configuration of a run as overrides would say it."""
    from psrl.telemetry.record import configuration

    config, _ = configuration(path / "config.yaml")
    return {key: "null" if value is None else str(value) for key, value in config.items() if not key.startswith(PLACES)}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
