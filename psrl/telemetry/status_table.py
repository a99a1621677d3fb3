"""The table of `psrl.status`: in place on a terminal, plain lines of full width anywhere else."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from psrl.outcome import COMPLETED, FAILED
from psrl.slurm.queue import RUNNING
from psrl.telemetry.member_status import NO_VERDICT, RUNNING_HERE, MemberStatus
from psrl.telemetry.members import short_keys

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

COLOURS = {COMPLETED: "green", FAILED: "bold red", NO_VERDICT: "red", RUNNING: "cyan", RUNNING_HERE: "cyan"}
FULL_WIDTH = 100_000
LEAST_FOLDED = 12
GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    texts: list[str]
    """One a member; "" where there is nothing to say."""
    is_number: bool = False
    folds: bool = False
    """A narrow terminal may break it over several lines."""
    spare: int = 0
    """Which column a narrow terminal goes without first: 1 before 2; 0 is always there."""

    @property
    def least_width(self) -> int:
        width = max(map(len, [self.title, *self.texts]))
        return min(width, LEAST_FOLDED) if self.folds else width


def columns(rows: Sequence[MemberStatus]) -> list[Column]:
    """Those that have something to say."""
    short = short_keys(list(rows[0].settings)) if rows else {}
    found = [
        Column("#", [row.name for row in rows]),
        *(Column(name, [row.settings[key] or "default" for row in rows], folds=True) for key, name in short.items()),
        Column("job", [row.job_id or "" for row in rows]),
        Column("state", [row.state for row in rows]),
        Column("step", [_of(row.step, row.total_steps) for row in rows], is_number=True),
        Column("reward", [_known(row.reward, ".3g") for row in rows], is_number=True, spare=5),
        Column("max stale", [_known(row.max_staleness, "d") for row in rows], is_number=True, spare=4),
        Column("tokens/s", [_known(row.tokens_per_s, ".0f") for row in rows], is_number=True, spare=3),
        Column("ETA", ["" if row.eta_s is None else hours_minutes(row.eta_s) for row in rows], is_number=True),
        Column("restarts", [str(row.restarts or "") for row in rows], is_number=True, spare=1),
        Column("requeues", [str(row.requeues or "") for row in rows], is_number=True, spare=2),
        Column("details", [row.detail for row in rows], folds=True),
    ]
    return [column for column in found if any(column.texts)]


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns without those that this many characters have no room for."""
    shown = list(columns)
    for column in sorted((c for c in columns if c.spare), key=lambda c: c.spare):
        if sum(c.least_width + GAP for c in shown) - GAP > width:
            shown.remove(column)
    return shown


def hours_minutes(seconds: float) -> str:
    """Rounded up to minutes. `hours_minutes(3601) == "1:01"`"""
    hours, minutes = divmod(-int(-seconds // 60), 60)
    return f"{hours}:{minutes:02d}"


def summary_line(rows: Sequence[MemberStatus]) -> str:
    """`summary_line` of a sweep of three: `3 members: 2 RUNNING, 1 completed`"""
    counts = Counter(row.state for row in rows).most_common()
    return f"{len(rows)} member{'s' * (len(rows) > 1)}: " + ", ".join(f"{count} {state}" for state, count in counts)


class Screen:
    """Where the table is shown. With `live` the next table takes the place of the last one on a terminal; anywhere else a
    table is printed only if it differs from the last one."""

    def __init__(self, title: str, stream: TextIO, *, live: bool) -> None:
        self._title, self._stream, self._is_live = title, stream, live
        self._live: Live | None = None
        self._shown = ""

    def __enter__(self) -> Screen:
        if self._is_live and self._stream.isatty():
            from rich.live import Live

            self._live = Live(console=_console(self._stream), auto_refresh=False, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, rows: Sequence[MemberStatus], notice: str) -> None:
        if self._live is not None:
            self._live.update(render(self._title, rows, notice, self._live.console.width), refresh=True)
        elif self._stream.isatty():
            console = _console(self._stream)
            console.print(render(self._title, rows, notice, console.width))
        elif (text := plain(self._title, rows, notice)) != self._shown:
            self._stream.write("\n" * bool(self._shown) + text)
            self._stream.flush()
            self._shown = text


def render(title: str, rows: Sequence[MemberStatus], notice: str, width: int) -> RenderableType:
    """Title, table, and below it what Slurm does not tell and what went wrong, each in full."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(title, style="bold", overflow="fold"), _table(rows, width)]
    if len(rows) > 1:
        lines.append(Text(summary_line(rows), style="dim"))
    if notice:
        lines.append(Text(notice, style="yellow", overflow="fold"))
    for row in rows:
        if row.trouble:
            lines.append(Text.assemble((f"{row.name}: ", "bold"), row.trouble, overflow="fold"))
    return Group(*lines)


def plain(title: str, rows: Sequence[MemberStatus], notice: str = "") -> str:
    """The same as it is read from a file: no colour, no line broken."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=FULL_WIDTH, color_system=None, force_terminal=False).print(
        render(title, rows, notice, FULL_WIDTH)
    )
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _table(rows: Sequence[MemberStatus], width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
    shown = fitting(columns(rows), width)
    for column in shown:
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=not column.folds,
            min_width=column.least_width,
            overflow="fold",
        )
    for index, row in enumerate(rows):
        styles = (COLOURS.get(row.state, "yellow") if column.title == "state" else "" for column in shown)
        table.add_row(*(Text(column.texts[index], style) for column, style in zip(shown, styles, strict=True)))
    return table


def _of(step: int, total: int | None) -> str:
    return str(step) if total is None else f"{step}/{total}"


def _known(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False)
