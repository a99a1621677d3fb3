"""All that a run directory tells about a run, read once. Missing and torn files mean an unfinished run, no error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from psrl.config.flat import flatten
from psrl.telemetry.incidents import read_incidents
from psrl.telemetry.metrics import Row, read_metrics
from psrl.telemetry.summary import summarise
from psrl.telemetry.timeline_read import Track, read_timeline

SIMULATION = "simulation.yaml"
"""In the directory of a simulation: what it assumed."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A death that a supervisor saw, at `time_s` of Unix time."""

    time_s: float
    role: str
    name: str
    cause: str
    restarting: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    run_dir: Path
    rows: list[Row]
    tracks: list[Track]
    summary: dict[str, Any]
    """Keys of `psrl.telemetry.summary.summarise`."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration, flat: "psrl.staleness" -> 1."""
    defaults: dict[str, Any] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    audit: str | None = None
    validations: list[Row] = field(default_factory=list)
    """One row a validated version; its step is that version."""
    simulated: bool = False
    """Nothing of it was measured: it comes from `python -m psrl.simulate`."""

    @property
    def finished(self) -> bool:
        return self.summary["status"] == "completed"

    def changed(self) -> list[tuple[str, Any, Any]]:
        """(key, value, default) of each configuration key that is not at its shipped default."""
        defaults = self.defaults
        return [(key, value, defaults.get(key)) for key, value in self.config.items() if value != defaults.get(key)]


def load_run(run_dir: Path, counts: Mapping[str, int] | None = None, audit: str | None = None) -> RunRecord:
    """Read a run directory, of a finished run or not.

    `counts` are those of `summarise` that the ledger knows, `audit` is the audit's text: the caller reads the ledger.
    Raises FileNotFoundError, naming it, if there is no such directory.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run directory at {run_dir}; give the directory that the run printed as run_dir=")
    rows = read_metrics(run_dir / "metrics.jsonl")
    tracks = read_timeline(run_dir / "timeline")
    meta, outcome = _json(run_dir / "run.json"), _json(run_dir / "outcome.json")
    incidents = [_incident(entry) for entry in read_incidents(run_dir / "logs")]
    counts = {"restarts": sum(incident.restarting for incident in incidents)} | dict(counts or {})
    summary = summarise(rows, tracks, counts, outcome, transport=_transport(meta, tracks))
    config, defaults = configuration(run_dir / "config.yaml")
    simulated = (run_dir / SIMULATION).is_file()
    if simulated:
        config, defaults = config | _assumed(run_dir / SIMULATION), defaults | _assumed(None)
    validations = read_metrics(run_dir / "validation.jsonl")
    return RunRecord(run_dir, rows, tracks, summary, config, defaults, incidents, audit, validations, simulated)


def configuration(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(resolved configuration, shipped defaults), both flat; empty without a file."""
    if not path.is_file():
        return {}, {}
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    return flatten(config) if isinstance(config, dict) else {}, _defaults()


def _assumed(path: Path | None) -> dict[str, Any]:
    """Keys of `simulation.*`: those of a simulation, or their defaults."""
    from omegaconf import OmegaConf

    from psrl.config.simulation import SimulationConfig

    section = OmegaConf.load(path) if path else OmegaConf.structured(SimulationConfig)
    return flatten({"simulation": OmegaConf.to_container(section)})


@cache
def _defaults() -> dict[str, Any]:
    from omegaconf import OmegaConf

    from psrl.config.schema import Config

    return flatten(OmegaConf.to_container(OmegaConf.structured(Config)))


def _transport(meta: Mapping[str, Any], tracks: list[Track]) -> str | None:
    told = [track.attributes.get("transport") for track in tracks]
    told += [span.attributes.get("transport") for track in tracks for span in track.spans]
    named = sorted({str(transport) for transport in told if transport})
    return meta.get("transport") or ", ".join(named) or None


def _incident(entry: Mapping[str, Any]) -> Incident:
    who = (str(entry.get("role", "")), str(entry.get("name", "")), str(entry.get("cause", "")))
    return Incident(float(entry["time_s"]), *who, bool(entry.get("restarting")))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
