"""The page of a sweep: its members side by side, in the look of a run's page and with links to theirs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.outcome import COMPLETED, FAILED
from psrl.telemetry import sweep_plots
from psrl.telemetry.figures import style
from psrl.telemetry.members import settings_text, short_keys
from psrl.telemetry.page import Card, big, known, render, seconds
from psrl.telemetry.sections import Plot, drawn
from psrl.telemetry.sweep_record import SweepMember, SweepRecord, SweepRow, values_compared


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    cell: Callable[[SweepRow], str]
    is_number: bool = True


FIGURES = (
    Column("steps", lambda r: str(r.steps) if r.total_steps is None else f"{r.steps} / {r.total_steps}"),
    Column("first reward", lambda r: known(r.reward_first, ".3g")),
    Column("last reward", lambda r: known(r.reward_last, ".3g")),
    Column("step", lambda r: seconds(r.step_s)),
    Column("speed-up", lambda r: known(r.speedup, ".2f")),
    Column("samples/s", lambda r: known(r.samples_per_s, ".4g")),
    Column("samples/s ratio", lambda r: known(r.samples_ratio, ".2f")),
    Column("tokens/s", lambda r: big(r.tokens_per_s)),
    Column("mean length", lambda r: known(r.length_consumed, ".1f")),
    Column("launched, at least", lambda r: known(r.length_at_least, ".1f")),
    Column("max staleness", lambda r: known(r.max_staleness, "d")),
    Column("instances busy", lambda r: known(r.rollout_busy_fraction, ".0%")),
    Column("trainer busy", lambda r: known(r.train_busy_fraction, ".0%")),
)
VALUE_COLUMNS = ("setting", "value", "members", "step", "samples/s", "last reward", "instances busy", "trainer busy")


def render_sweep(record: SweepRecord) -> str:
    """The HTML of a sweep at any time of its life; members without steps are shown as such."""
    columns = table_columns(record)
    with style():
        sections = _sections(record)
    return render(
        "sweep.html.j2",
        title=f"Sweep {record.directory.name}",
        status=sweep_status(record),
        lead=headline(record),
        where=str(record.directory),
        cards=cards(record),
        definition=definition(record),
        columns=columns,
        members=[{"page": _page_of(record, m), "cells": [c.cell(m.row) for c in columns]} for m in record.members],
        causes=[(m.row.name, m.row.cause) for m in record.members if m.row.cause],
        value_columns=VALUE_COLUMNS,
        values=[_value_row(*entry) for entry in values_compared(record)],
        sections=sections,
    )


def table_columns(record: SweepRecord) -> list[Column]:
    """Member, settings, status and the figures; the first is the link."""
    settings = [
        Column(_breakable(name), lambda r, key=key: r.settings[key] or "default", is_number=False)  # type: ignore[misc]
        for key, name in short_keys(record.keys).items()
    ]
    return [
        Column("member", lambda r: r.name, is_number=False),
        *settings,
        Column("status", lambda r: r.status if r.steps or r.cause else "no steps yet", is_number=False),
        *FIGURES,
    ]


def definition(record: SweepRecord) -> str:
    """What the figures of the table mean: said once, here."""
    over = "the member with staleness 0 and otherwise equal settings (none there: –)"
    if not record.by_staleness:
        first = next((m for m in record.members if m.row.step_s), None)
        over = _who(first.row) if first else "the first member with steps"
    return (
        "Step: median time of a step, the first left out, since it waits for the first samples of all; samples/s and "
        "tokens/s: what was trained over step time, in the same steps. "
        f"Speed-up: step time of {over}, divided by this member's; samples/s ratio: samples/s over that member's. "
        "Mean length: response tokens of what trained; launched, at least: of everything that was begun (what was "
        "cut short would have been longer): where the two differ, short answers were favoured. "
        "First and last reward: means of five steps each."
    )


def sweep_status(record: SweepRecord) -> str:
    """completed: all are; failed: at least one has; else unfinished."""
    states = {member.row.status for member in record.members}
    return COMPLETED if states == {COMPLETED} else FAILED if FAILED in states else "unfinished"


def headline(record: SweepRecord) -> str:
    """What one would say of the sweep in three sentences."""
    counts = Counter(member.row.status for member in record.members)
    words = [
        f"{len(record.members)} members: " + ", ".join(f"{n} {status}" for status, n in counts.most_common()) + "."
    ]
    best = _greatest([member.row for member in record.members], lambda r: r.reward_last)
    if best is not None:
        words.append(f"The highest reward at the end, {best.reward_last:.3g}, is that of {_who(best)}.")
    fastest = _fastest(record)
    if fastest is not None:
        over = next(m for m in record.members if m.row.name == fastest.row.reference)
        words.append(
            f"The largest speed-up, {fastest.row.speedup:.2f}, is that of {_who(fastest.row)} over {_who(over.row)}."
        )
    return " ".join(words)


def cards(record: SweepRecord) -> list[Card]:
    """The headline numbers; "–" where nothing tells."""
    rows = [member.row for member in record.members]
    completed = sum(row.status == COMPLETED for row in rows)
    best = _greatest(rows, lambda r: r.reward_last)
    quick = _greatest(rows, lambda r: r.step_s and -r.step_s)
    fast = _fastest(record)
    stale = _greatest(rows, lambda r: r.max_staleness)
    return [
        Card("Members", f"{completed} / {len(rows)}", "completed"),
        Card("Best reward", known(best.reward_last if best else None, ".3g"), _who(best)),
        Card("Shortest step", seconds(quick.step_s if quick else None), _who(quick)),
        Card("Largest speed-up", known(fast.row.speedup if fast else None, ".2f"), _who(fast.row if fast else None)),
        Card("Staleness", known(stale.max_staleness if stale else None, "d"), "versions behind at most"),
    ]


def _sections(record: SweepRecord) -> list[Any]:
    members = record.members
    return drawn(
        (
            "Reward",
            "Mean reward of the samples of each step, over time and over samples. Time is the sum of step times: waiting in "
            "the queue, start-up and steps that a resumed run repeated are not in it.",
            [
                Plot(
                    lambda: sweep_plots.reward_over_time(members), "Reward over time", "Over training time", wide=True
                ),
                Plot(
                    lambda: sweep_plots.reward_over_samples(members), "Reward over samples", "Over samples", wide=True
                ),
            ],
        ),
        (
            "Speed",
            "Beside a bar its speed-up, as defined above. The larger of the two busy shares bounds a run.",
            [
                Plot(lambda: sweep_plots.step_times(members), "Step time by member"),
                Plot(lambda: sweep_plots.busy_shares(members), "Busy shares by member"),
            ],
        ),
        (
            "Staleness",
            "How many versions the training weights were ahead of those that a group was started with, as shares of groups."
            + (f" The first {sweep_plots.MAX_PANELS} members." if len(members) > sweep_plots.MAX_PANELS else ""),
            [Plot(lambda: sweep_plots.staleness_histograms(members), "Staleness of each member", wide=True)],
        ),
    )


def _fastest(record: SweepRecord) -> SweepMember | None:
    """The member with the largest speed-up over another one."""
    compared = [m for m in record.members if m.row.speedup is not None and m.row.reference != m.row.name]
    return max(compared, key=lambda m: m.row.speedup or 0.0, default=None)


def _greatest(rows: Sequence[SweepRow], figure: Callable[[SweepRow], float | None]) -> SweepRow | None:
    """The row whose figure is the greatest, None if none has it."""
    having = [(value, -index, row) for index, row in enumerate(rows) if (value := figure(row)) is not None]
    return max(having, key=lambda entry: entry[:2])[2] if having else None


def _value_row(key: str, value: str, rows: Sequence[SweepRow]) -> list[str]:
    trained = [row for row in rows if row.steps]
    return [
        key,
        value or "default",
        str(len(rows)),
        seconds(_mean(trained, "step_s")),
        known(_mean(trained, "samples_per_s"), ".4g"),
        known(_mean(trained, "reward_last"), ".3g"),
        known(_mean(trained, "rollout_busy_fraction"), ".0%"),
        known(_mean(trained, "train_busy_fraction"), ".0%"),
    ]


def _mean(rows: Sequence[SweepRow], name: str) -> float | None:
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    return sum(values) / len(values) if values else None


def _who(row: SweepRow | None) -> str:
    if row is None:
        return ""
    settings = settings_text(row.settings)
    return f"member {row.name}" + (f" ({settings})" if settings else "")


def _page_of(record: SweepRecord, member: SweepMember) -> str:
    """Link to the member's own page, from the sweep's."""
    return os.path.relpath(member.member.path / "report" / "index.html", record.directory / "report")


def _breakable(key: str) -> str:
    """The key with places where a browser may break it."""
    return re.sub(r"([._])", "\\1\u200b", key)
