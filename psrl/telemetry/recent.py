"""What a run did last, from the ends of its files: they may be large, and whoever watches looks every few seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from psrl.telemetry.incidents import read_incidents
from psrl.telemetry.metrics import STEP_KEY, Row, number, parse_rows, surviving

BLOCK = 1 << 16
LOG_TAIL = 1 << 15
STALENESS = re.compile(rb'"staleness/max":\s*(\d+)')
WRONG = re.compile(r" (?:ERROR|CRITICAL) |^(?:\w+\.)*\w*(?:Error|Exception)\b|^(?:srun|slurmstepd|slurmd): error: ")
HINTS = ("ERROR", "CRITICAL", "Error", "Exception", "error: ")
"""One of them is in every line that `WRONG` finds: much cheaper to look for."""
WHEN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z?")
LEVEL = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) ")
LONGEST_LINE = 400


def recent_rows(path: Path, count: int) -> list[Row]:
    """The last rows of the surviving history of a metrics file, at most `count`, in step order; only its end is read."""
    try:
        with path.open("rb") as file:
            start = file.seek(0, 2)
            data = b""
            while True:
                length = min(BLOCK, start)
                start -= length
                file.seek(start)
                data = file.read(length) + data
                whole = data[: data.rfind(b"\n") + 1]
                if start:
                    whole = whole[whole.find(b"\n") + 1 :]  # the first line began before what was read
                rows = surviving(parse_rows(whole.splitlines()))
                if len(rows) >= count or not start:
                    return rows[-count:]
    except FileNotFoundError:
        return []


class StalenessTail:
    """The greatest staleness in a metrics file; each call reads only what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._greatest: int | None = None

    def poll(self) -> int | None:
        """None before the first row that has one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while data := file.read(BLOCK * 16):
                    whole = data[: data.rfind(b"\n") + 1]
                    if not whole:
                        break
                    self._offset += len(whole)
                    file.seek(self._offset)
                    found = [int(value) for value in STALENESS.findall(whole)]
                    self._greatest = max([*found, self._greatest or 0]) if found else self._greatest
        except FileNotFoundError:
            pass
        return self._greatest


def mean_of(rows: Iterable[Row], key: str) -> float | None:
    values = [value for row in rows if (value := number(row, key)) is not None]
    return sum(values) / len(values) if values else None


def rate(rows: Iterable[Row], key: str) -> float | None:
    """Sum of `key` over the sum of step times, of the rows that have both."""
    pairs = [(number(row, key), number(row, "timing_s/step")) for row in rows]
    known = [(amount, seconds) for amount, seconds in pairs if amount is not None and seconds is not None]
    total_s = sum(seconds for _, seconds in known)
    return sum(amount for amount, _ in known) / total_s if total_s > 0 else None


def last_step(rows: Sequence[Row]) -> int:
    return int(rows[-1][STEP_KEY]) if rows else 0


def restarts(logs: Path) -> int:
    """How many processes were started again in place."""
    return sum(bool(incident.get("restarting")) for incident in read_incidents(logs))


def last_trouble(logs: Path) -> str:
    """The newest death or error line in a run's logs, with its time if it has one; "" if there is none."""
    found = [_line_of_incident(incident) for incident in read_incidents(logs)[-1:]]
    for log in sorted([*logs.glob("*.log"), *logs.glob("slurm-*.out")]):
        found += last_error(log.stem, _end_of(log))
    return max(found, default=(0.0, ""))[1]


def last_error(name: str, lines: Sequence[str]) -> list[tuple[float, str]]:
    """[(Unix time, text)] of the last error in a log's lines, none without one. A line without a time of its own, such
    as the end of a traceback, has that of the last line before it that has one; 0.0: no time is known."""
    for index in range(len(lines) - 1, -1, -1):
        if any(hint in lines[index] for hint in HINTS) and WRONG.search(lines[index]):
            dates = (when for line in reversed(lines[: index + 1]) if (when := WHEN.search(line)))
            when = next(dates, None)
            time_s = 0.0 if when is None else datetime.fromisoformat(when.group()).timestamp()
            return [(time_s, _dated(time_s, f"{name}: {LEVEL.sub('', lines[index].strip())[:LONGEST_LINE]}"))]
    return []


def _line_of_incident(incident: dict) -> tuple[float, str]:
    followed = "started again" if incident.get("restarting") else "not started again"
    who, time_s = incident.get("name") or incident.get("role"), float(incident["time_s"])
    return time_s, _dated(time_s, f"{who} ended by {incident.get('cause')}, {followed}")


def _dated(time_s: float, text: str) -> str:
    return f"{datetime.fromtimestamp(time_s):%m-%d %H:%M:%S} {text}" if time_s else text


def _end_of(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            start = max(file.seek(0, 2) - LOG_TAIL, 0)
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return lines[1:] if start else lines
