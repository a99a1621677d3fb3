"""The table of `psrl.status`: in place on a terminal, plain lines of full width anywhere else."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
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
NUMBERS = ("step", "reward", "staleness", "tokens/s", "ETA", "restarts", "requeues")
FOLDED = ("state",)
"""Columns that a narrow terminal may break over several lines, as it may settings."""


def cells(row: MemberStatus, short: dict[str, str]) -> dict[str, str]:
    """Column name to text; "" where there is nothing to say."""
    return {
        "#": row.name,
        **{short[key]: value or "default" for key, value in row.settings.items()},
        "job": row.job_id or "",
        "state": f"{row.state} {row.detail}".strip(),
        "step": str(row.step) if row.total_steps is None else f"{row.step}/{row.total_steps}",
        "reward": "" if row.reward is None else f"{row.reward:.3g}",
        "staleness": "" if row.max_staleness is None else str(row.max_staleness),
        "tokens/s": "" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
        "ETA": "" if row.eta_s is None else hours_minutes(row.eta_s),
        "restarts": str(row.restarts or ""),
        "requeues": str(row.requeues or ""),
    }


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
        content = render(self._title, rows, notice)
        if self._live is not None:
            self._live.update(content, refresh=True)
        elif self._stream.isatty():
            _console(self._stream).print(content)
        elif (text := plain(content)) != self._shown:
            self._stream.write("\n" * bool(self._shown) + text)
            self._stream.flush()
            self._shown = text


def render(title: str, rows: Sequence[MemberStatus], notice: str) -> RenderableType:
    """Title, table, and below it what Slurm does not tell and what went wrong, each in full."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(title, style="bold", overflow="fold"), _table(rows)]
    if len(rows) > 1:
        lines.append(Text(summary_line(rows), style="dim"))
    if notice:
        lines.append(Text(notice, style="yellow", overflow="fold"))
    for row in rows:
        if row.trouble:
            lines.append(Text.assemble((f"{row.name}: ", "bold"), row.trouble, overflow="fold"))
    return Group(*lines)


def plain(content: RenderableType) -> str:
    """The text as it is read from a file: no colour, no line broken."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=FULL_WIDTH, color_system=None, force_terminal=False).print(content)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _table(rows: Sequence[MemberStatus]) -> RenderableType:
    from rich.table import Table

    short = short_keys(list(rows[0].settings)) if rows else {}
    lines = [cells(row, short) for row in rows]
    columns = [name for name in lines[0] if any(line[name] for line in lines)] if lines else []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        folds = name in FOLDED or name in short.values()
        width = max(len(line[name]) for line in lines) if name == "job" else None
        table.add_column(
            name,
            justify="right" if name in NUMBERS else "left",
            no_wrap=not folds,
            min_width=width,
            overflow="fold" if folds else "ellipsis",
        )
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*(_styled(name, line[name], row) for name in columns))
    return table


def _styled(name: str, text: str, row: MemberStatus) -> RenderableType:
    from rich.text import Text

    return Text(text, style=COLOURS.get(row.state, "yellow") if name == "state" else "")


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False)
