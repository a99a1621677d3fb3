"""`python -m psrl.audit RUN_DIR`: does the ledger of a run account for every group?

Reads the journal on its own, without the staleness state machine, so that a mistake there is not repeated here. Exit
status: 0 every promise is kept, 1 a finding, 2 the run directory cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from psrl.coordinator.ledger import LedgerError, replay
from psrl.coordinator.records import (
    DROPPED,
    REQUEUED,
    YIELDING_REASONS,
    AnyRecord,
    Checkpoint,
    End,
    Epoch,
    Occupy,
    Publish,
    Release,
    Reserve,
    ShortBuffer,
    Start,
    Take,
)

_MAX_FINDINGS = 20


@dataclass(slots=True)
class _Group:
    data_epoch: int
    prompt: int
    version: int
    buffer: int = -1
    fate: str = "open"
    """open | waiting (sealed, not trained) | trained | requeued | dropped"""


@dataclass(slots=True)
class AuditReport:
    """What became of every group in the surviving history: what a resume abandoned and trained again counts once."""

    reserved: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    """open | waiting | trained | requeued | dropped, together `reserved`."""
    released: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (outcome, reason)."""
    lags: Counter[int] = field(default_factory=Counter)
    """Trained groups by the versions that they lagged behind the weights they trained."""
    steps: int = 0
    """Buffers trained and published."""
    starts: int = 0
    coordinator_starts: int = 0
    status: str = ""
    """As the last End record says; empty while the run is unfinished."""
    findings: list[str] = field(default_factory=list)

    @property
    def max_lag(self) -> int | None:
        return max(self.lags, default=None)

    def lines(self) -> list[str]:
        fates = ", ".join(
            f"{self.fates[name]} {name}" for name in ("trained", "waiting", "open", "requeued", "dropped")
        )
        out = [
            f"groups: {self.reserved} reserved = {fates}",
            *(f"  {outcome}, {reason}: {count}" for (outcome, reason), count in sorted(self.released.items())),
            f"steps: {self.steps} trained and published",
            f"lag: most {self.max_lag}, " + ", ".join(f"{n} at {lag}" for lag, n in sorted(self.lags.items()))
            if self.lags
            else "lag: nothing trained",
            f"starts: {self.starts} trainer, {self.coordinator_starts} coordinator",
            f"status: {self.status or 'unfinished'}",
        ]
        hidden = len(self.findings) - _MAX_FINDINGS
        out += [f"FINDING: {finding}" for finding in self.findings[:_MAX_FINDINGS]]
        return [*out, f"... and {hidden} more findings"] if hidden > 0 else out


class _Auditor:
    def __init__(self, buffer_entries: int, staleness: int) -> None:
        self.buffer_entries = buffer_entries
        self.staleness = staleness
        self.report = AuditReport()
        self.groups: dict[int, _Group] = {}
        self.buffers: dict[int, list[int]] = {}
        self.taken: dict[int, int] = {}
        self.version = 0
        self.incarnation = -1
        self.short: ShortBuffer | None = None
        self.gave_way: set[tuple[int, int]] = set()
        """Prompts, as (data epoch, prompt), whose group was once taken back for the sake of others."""

    def find(self, text: str) -> None:
        self.report.findings.append(text)

    def size_of(self, buffer: int) -> int:
        return self.short.size if self.short is not None and self.short.buffer == buffer else self.buffer_entries

    def feed(self, record: AnyRecord) -> None:
        match record:
            case Reserve():
                self.on_reserve(record)
            case Occupy():
                self.on_occupy(record)
            case Release():
                self.on_release(record)
            case Take():
                self.on_take(record)
            case Publish():
                self.on_publish(record)
            case Start():
                self.on_start(record)
            case ShortBuffer():
                self.on_short_buffer(record)
            case Checkpoint():
                if record.version > self.version:
                    self.find(f"checkpoint {record.version} is complete before version {record.version} was published")
            case Epoch():
                self.report.coordinator_starts += 1
                self.report.status = ""
            case End():
                self.report.status = record.status

    def on_reserve(self, record: Reserve) -> None:
        if record.group in self.groups:
            self.find(f"group {record.group} is reserved twice")
        if record.version > self.version:
            self.find(f"group {record.group} starts at version {record.version}, the newest is {self.version}")
        self.groups[record.group] = _Group(record.data_epoch, record.prompt, record.version)

    def on_occupy(self, record: Occupy) -> None:
        group = self.groups.get(record.group)
        if group is None or group.fate != "open":
            self.find(f"group {record.group} enters buffer {record.buffer} but is {group.fate if group else 'unknown'}")
            return
        if self.taken.get(record.buffer, 0) >= self.size_of(record.buffer):
            self.find(f"group {record.group} enters buffer {record.buffer}, which trains already")
        group.fate, group.buffer = "waiting", record.buffer
        self.buffers.setdefault(record.buffer, []).append(record.group)

    def on_release(self, record: Release) -> None:
        group = self.groups.get(record.group)
        if (
            group is None
            or group.fate not in ("open", "waiting")
            or (group.fate == "waiting" and record.outcome != DROPPED)
        ):
            self.find(f"group {record.group} is released ({record.reason}) but is {group.fate if group else 'unknown'}")
            return
        if not record.reason or record.outcome not in (DROPPED, REQUEUED):
            self.find(f"group {record.group} is released as {record.outcome!r} with reason {record.reason!r}")
        if record.reason in YIELDING_REASONS:
            prompt = (group.data_epoch, group.prompt)
            if prompt in self.gave_way:
                self.find(f"prompt {group.prompt} of data epoch {group.data_epoch} gave way to others twice")
            self.gave_way.add(prompt)
        if group.fate == "waiting":
            self.buffers[group.buffer].remove(record.group)
            group.buffer = -1
        group.fate = record.outcome
        self.report.released[record.outcome, record.reason] += 1

    def on_take(self, record: Take) -> None:
        buffer, first = record.buffer, self.taken.get(record.buffer, 0)
        if buffer != self.version:
            self.find(f"buffer {buffer} is taken while the newest version is {self.version}")
        if self.buffers.get(buffer, [])[first : first + len(record.groups)] != record.groups:
            self.find(f"groups {record.groups} are taken from buffer {buffer} out of the order of occupation")
        self.taken[buffer] = first + len(record.groups)
        for number in record.groups:
            group = self.groups.get(number)
            if group is None or group.fate != "waiting" or group.buffer != buffer:
                self.find(f"group {number} is trained in buffer {buffer} but is {group.fate if group else 'unknown'}")
                continue
            group.fate = "trained"
            if group.version + self.staleness < buffer:
                self.find(
                    f"group {number} of version {group.version} is trained in buffer {buffer}: "
                    f"a lag of {buffer - group.version}, psrl.staleness={self.staleness} allows {self.staleness}"
                )

    def on_publish(self, record: Publish) -> None:
        buffer = record.version - 1
        if record.version != self.version + 1:
            self.find(f"version {record.version} is published after {self.version}")
        if self.taken.get(buffer, 0) != self.size_of(buffer):
            self.find(
                f"buffer {buffer} is trained with {self.taken.get(buffer, 0)} groups instead of {self.size_of(buffer)}"
            )
        self.version = record.version

    def on_start(self, record: Start) -> None:
        if record.incarnation != self.incarnation + 1:
            self.find(f"incarnation {record.incarnation} starts after {self.incarnation}")
        self.incarnation = record.incarnation
        self.report.starts += 1
        in_flight = [number for number, group in self.groups.items() if group.fate == "open"]
        if in_flight:
            self.find(f"groups {in_flight} are in flight across the trainer start at version {record.version}")
        self.version = record.version
        for buffer, numbers in self.buffers.items():
            if buffer < record.version:
                continue
            self.taken.pop(buffer, None)
            for number in numbers:
                group = self.groups[number]
                group.fate = "waiting"
                group.version = min(group.version, max(record.version, buffer - self.staleness))

    def on_short_buffer(self, record: ShortBuffer) -> None:
        first = self.version if self.taken.get(self.version, 0) < self.size_of(self.version) else self.version + 1
        left = [number for buffer in sorted(self.buffers) if buffer >= first for number in self.buffers[buffer]]
        self.buffers = {buffer: numbers for buffer, numbers in self.buffers.items() if buffer < first}
        for index, number in enumerate(left):
            group = self.groups[number]
            group.buffer = first + index // self.buffer_entries
            group.version = min(group.version, group.buffer)
            self.buffers.setdefault(group.buffer, []).append(number)
        self.short = record
        size = len(self.buffers.get(record.buffer, []))
        if size != record.size or any(buffer > record.buffer for buffer in self.buffers):
            self.find(f"the last buffer {record.buffer} is said to hold {record.size} groups, it holds {size}")

    def finish(self) -> AuditReport:
        report = self.report
        report.reserved = len(self.groups)
        report.fates = Counter(group.fate for group in self.groups.values())
        report.steps = self.version
        trained: dict[tuple[int, int], int] = {}
        for number, group in self.groups.items():
            if group.fate not in ("trained", "waiting"):
                continue
            other = trained.setdefault((group.data_epoch, group.prompt), number)
            if other != number:
                self.find(
                    f"prompt {group.prompt} of data epoch {group.data_epoch} counts twice: groups {other}, {number}"
                )
            if group.fate == "trained":
                report.lags[group.buffer - group.version] += 1
        places = Counter(number for numbers in self.buffers.values() for number in numbers)
        report.findings += [f"group {number} is in {count} places" for number, count in places.items() if count > 1]
        if report.status == "completed" and report.fates["open"]:
            self.find(f"the run is completed with {report.fates['open']} groups in flight")
        return report


def audit(records: Iterable[AnyRecord], *, buffer_entries: int, staleness: int) -> AuditReport:
    """Account for every group in `records`, the whole journal in order.

    `buffer_entries`: groups a step (psrl.staleness_buffer_entries); `staleness`: the bound (psrl.staleness).
    """
    auditor = _Auditor(buffer_entries, staleness)
    for record in records:
        auditor.feed(record)
    return auditor.finish()


def _settings(run_dir: Path) -> tuple[int, int]:
    """(psrl.staleness_buffer_entries, psrl.staleness) of RUN_DIR/config.yaml. Raises ValueError naming the key."""
    import yaml

    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text())
    psrl = config.get("psrl") if isinstance(config, dict) else None
    values = []
    for key in ("staleness_buffer_entries", "staleness"):
        value = psrl.get(key) if isinstance(psrl, dict) else None
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{path}: psrl.{key}={value!r} must be an integer")
        values.append(value)
    return values[0], values[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m psrl.audit", description="Account for every group of a run.")
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args(argv).run_dir
    try:
        if not (run_dir / "ledger").is_dir():
            raise ValueError(f"{run_dir / 'ledger'} does not exist: give the directory of a run (run_dir)")
        buffer_entries, staleness = _settings(run_dir)
        report = audit(replay(run_dir / "ledger"), buffer_entries=buffer_entries, staleness=staleness)
    except (OSError, ValueError, LedgerError) as error:
        print(f"cannot audit {run_dir}: {error}", file=sys.stderr)
        return 2
    print("\n".join(report.lines()))
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
