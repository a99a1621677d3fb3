"""A sweep side by side: one row of figures a member, and how much faster each is than its reference. Files only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from psrl.telemetry.members import Member, settings_text
from psrl.telemetry.metrics import Row, number
from psrl.telemetry.recent import rate
from psrl.telemetry.record import RunRecord, load_run

STALENESS = "psrl.staleness"
FROM_SUMMARY = (
    "status",
    "cause",
    "steps",
    "reward_first",
    "reward_last",
    "max_staleness",
    "rollout_busy_fraction",
    "train_busy_fraction",
    "length_consumed",
    "length_at_least",
    "wall_s",
)
"""Figures that are those of the member's own page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """The figures of one member. None: nothing tells."""

    name: str
    run_dir: str
    settings: dict[str, str]
    staleness: int | None
    """`psrl.staleness`."""
    status: str
    cause: str
    steps: int
    total_steps: int | None
    reward_first: float | None
    reward_last: float | None
    """Means of the first and the last five steps."""
    step_s: float | None
    """Median over the steady steps: all but the first, which waits for the first samples of all."""
    samples_per_s: float | None
    """Trained samples over step time, of the steady steps; so with tokens."""
    tokens_per_s: float | None
    max_staleness: int | None
    rollout_busy_fraction: float | None
    train_busy_fraction: float | None
    length_consumed: float | None
    """Mean tokens of the responses that trained; beside it a lower bound of the mean of all that were launched."""
    length_at_least: float | None
    wall_s: float | None
    reference: str | None = None
    """Name of the member that the two ratios are over."""
    speedup: float | None = None
    """Step time of the reference over that of this member."""
    samples_ratio: float | None = None
    """Samples a second over those of the reference."""


@dataclass(frozen=True, slots=True)
class SweepMember:
    member: Member
    row: SweepRow
    rows: list[Row] = field(default_factory=list)
    """Metrics rows."""

    @property
    def label(self) -> str:
        text = settings_text(self.member.settings)
        return f"{self.row.name}: {text}" if text else self.row.name


@dataclass(frozen=True, slots=True)
class SweepRecord:
    directory: Path
    sweep: str
    members: list[SweepMember]
    by_staleness: bool
    """Ratios are over the member with staleness 0 and otherwise equal settings; else over the first that has steps."""

    @property
    def keys(self) -> list[str]:
        """Settings that differ between members."""
        return list(self.members[0].member.settings) if self.members else []

    @property
    def with_steps(self) -> list[SweepMember]:
        return [member for member in self.members if member.rows]

    def data(self) -> dict[str, Any]:
        """What `sweep.json` holds."""
        return {
            "sweep": self.sweep,
            "directory": str(self.directory),
            "members": [asdict(member.row) for member in self.members],
        }


def load_sweep(directory: Path, members: Sequence[Member]) -> SweepRecord:
    """Read every member's directory, finished or not."""
    loaded = [_member(member, load_run(member.path)) for member in members]
    rows = [member.row for member in loaded]
    by_staleness = sweeps_staleness(rows)
    compared = [
        replace(member, row=compare(member.row, reference_of(member.row, rows, by_staleness))) for member in loaded
    ]
    return SweepRecord(directory, next((m.sweep for m in members if m.sweep), ""), compared, by_staleness)


def sweeps_staleness(rows: Sequence[SweepRow]) -> bool:
    """Whether staleness differs between the members and one of them, with steady steps, has 0."""
    return len({row.staleness for row in rows}) > 1 and any(row.staleness == 0 and row.step_s for row in rows)


def reference_of(row: SweepRow, rows: Sequence[SweepRow], by_staleness: bool) -> SweepRow | None:
    """The member that `row` is compared with, None if there is none: see `SweepRecord.by_staleness`."""
    for other in rows:
        if other.step_s and (not by_staleness or (other.staleness == 0 and _others(other) == _others(row))):
            return other
    return None


def compare(row: SweepRow, reference: SweepRow | None) -> SweepRow:
    """`row` with its ratios to `reference`."""
    if reference is None or not reference.step_s or not row.step_s:
        return row
    known = reference.samples_per_s and row.samples_per_s
    return replace(
        row,
        reference=reference.name,
        speedup=reference.step_s / row.step_s,
        samples_ratio=row.samples_per_s / reference.samples_per_s if known else None,  # type: ignore[operator]
    )


def values_compared(record: SweepRecord) -> list[tuple[str, str, list[SweepRow]]]:
    """(key, value, rows of the members that have it), of each setting; without a second setting this says nothing new."""
    if len(record.keys) < 2:
        return []
    out = []
    for key in record.keys:
        values = dict.fromkeys(member.member.settings[key] for member in record.members)
        out += [(key, value, [m.row for m in record.members if m.member.settings[key] == value]) for value in values]
    return out


def _others(row: SweepRow) -> Mapping[str, str]:
    return {key: value for key, value in row.settings.items() if key != STALENESS}


def _member(member: Member, record: RunRecord) -> SweepMember:
    summary, steady = record.summary, record.rows[1:]
    step_times = [step_s for row in steady if (step_s := number(row, "timing_s/step")) is not None]
    row = SweepRow(
        name=member.name,
        run_dir=str(member.path),
        settings=dict(member.settings),
        staleness=record.config.get(STALENESS),
        total_steps=record.config.get("trainer.total_training_steps"),
        step_s=median(step_times) if step_times else None,
        samples_per_s=rate(steady, "training/num_samples"),
        tokens_per_s=rate(steady, "perf/total_num_tokens"),
        **{key: summary[key] for key in FROM_SUMMARY},
    )
    return SweepMember(member, row, record.rows)
