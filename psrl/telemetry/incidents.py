"""Deaths and restarts, one JSON line each, as the supervisors saw them: `logs/incidents-<supervisor>.jsonl`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class IncidentLog:
    """Appends; one writer a file."""

    def __init__(self, logs_dir: Path, supervisor: str) -> None:
        self._path = logs_dir / f"incidents-{supervisor}.jsonl"

    def write(self, **what: Any) -> None:
        """One incident: role, name, cause, restarting; the Unix time is added."""
        with self._path.open("a") as file:
            file.write(json.dumps({"time_s": round(time.time(), 3), **what}) + "\n")


def read_incidents(logs_dir: Path) -> list[dict[str, Any]]:
    """All incidents of a run in order of time; torn lines are skipped."""
    incidents = []
    for path in logs_dir.glob("incidents-*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                incidents.append(json.loads(line))
            except ValueError:
                continue
    return sorted(incidents, key=lambda i: i["time_s"])
