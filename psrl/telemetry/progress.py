"""What a person sees while the run goes on: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from psrl.telemetry.metrics import STEP_KEY, number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

PLAIN_INTERVAL_S = 5.0
"""Without a terminal, at most one line in this time; the last step is always told."""
ETA_STEPS = 10
"""Steps whose mean time the remaining time is reckoned from."""


@dataclass(frozen=True, slots=True)
class ProgressState:
    """All that the display shows. None: not known (yet)."""

    step: int = 0
    total_steps: int | None = None
    version: int | None = None
    reward: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    alive: int | None = None
    instances: int | None = None
    phase: str = "starting"


def next_state(state: ProgressState, row: Mapping[str, Any], step_s: float | None) -> ProgressState:
    """State after this metrics row. `step_s`: seconds a step takes at present. Steps may go back (a restart from a
    checkpoint) or begin above 1 (a resumed run); the row is the truth."""
    step = int(row[STEP_KEY])
    remaining = None if state.total_steps is None else max(state.total_steps - step, 0)
    version = number(row, "training/version")
    return replace(
        state,
        step=step,
        version=step if version is None else int(version),
        reward=number(row, "critic/rewards/mean"),
        staleness_mean=number(row, "staleness/mean"),
        staleness_max=number(row, "staleness/max"),
        tokens_per_s=number(row, "perf/throughput"),
        eta_s=None if remaining is None or step_s is None else remaining * step_s,
        phase="training",
    )


def facts(state: ProgressState) -> list[tuple[str, str]]:
    """(label, value) of everything known beside the step, the most important first: a narrow terminal cuts the end."""
    out: list[tuple[str, str]] = []
    if state.reward is not None:
        out.append(("reward", f"{state.reward:.3g}"))
    if state.staleness_mean is not None:
        most = "" if state.staleness_max is None else f"/{state.staleness_max:.0f}"
        out.append(("staleness", f"{state.staleness_mean:.1f}{most}"))
    if state.tokens_per_s is not None:
        out.append(("", f"{state.tokens_per_s:.0f} tok/s"))
    if state.eta_s is not None:
        out.append(("eta", duration(state.eta_s)))
    if state.version is not None:
        out.append(("version", str(state.version)))
    if state.alive is not None:
        out.append(("instances", str(state.alive) if state.instances is None else f"{state.alive}/{state.instances}"))
    return out


def plain_line(state: ProgressState) -> str:
    """`step 12/100 version 12 reward 0.53 staleness 0.8/1 1234 tok/s eta 0:43`"""
    step = f"step {state.step}" if state.total_steps is None else f"step {state.step}/{state.total_steps}"
    known = sorted(facts(state), key=lambda fact: fact[0] != "version")
    words = [f"{label} {value}".strip() for label, value in known]
    return " ".join([step, *words])


def duration(seconds: float) -> str:
    """`duration(43) == "0:43"`, `duration(3723) == "1:02:03"`"""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Shows a run's progress on `stream`: live if that is a terminal, else a plain line at most every few seconds.

    `NO_COLOR` and `TERM=dumb` are respected. Not thread-safe; `close` leaves the last state on the screen.
    """

    def __init__(self, total_steps: int | None, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = ProgressState(total_steps=total_steps)
        self._stream = stream
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=ETA_STEPS)
        self._told_s: float | None = None
        self._untold = False
        self._live = _live(stream, self._render) if _is_live(stream) else None

    @property
    def state(self) -> ProgressState:
        return self._state

    def update(self, row: Mapping[str, Any]) -> None:
        """A step is done: `row` is its metrics row."""
        step_s = number(row, "perf/time_per_step")
        if step_s is None:
            step_s = number(row, "timing_s/step")
        if step_s is not None:
            self._recent.append(step_s)
        mean_s = sum(self._recent) / len(self._recent) if self._recent else None
        self._state = next_state(self._state, row, mean_s)
        self._untold = True
        last = self._state.step == self._state.total_steps
        if self._live is not None:
            self._live.refresh()
        elif last or self._told_s is None or self._clock() - self._told_s >= PLAIN_INTERVAL_S:
            self._tell()

    def instances(self, alive: int, total: int | None = None) -> None:
        """How many rollout instances are alive, of how many."""
        self._state = replace(self._state, alive=alive, instances=total)

    def phase(self, text: str) -> None:
        """What goes on while no step gets done ("starting 2 instances", "draining"); a plain line of its own."""
        if text == self._state.phase:
            return
        self._state = replace(self._state, phase=text)
        if self._live is not None:
            self._live.refresh()
        else:
            self._print(text)

    def note(self, text: str) -> None:
        """A line that stays, above the display: a death, a checkpoint, where the report is."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._untold:
            self._tell()

    def _tell(self) -> None:
        self._told_s = self._clock()
        self._untold = False
        self._print(plain_line(self._state))

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _render(self) -> RenderableType:
        return _display(self._state)


def _is_live(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _live(stream: TextIO, render: Callable[[], RenderableType]) -> Live:
    from rich.console import Console
    from rich.live import Live

    console: Console = Console(file=stream)
    live = Live(
        get_renderable=render, console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False
    )
    live.start()
    return live


def _display(state: ProgressState) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total = state.total_steps
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1, min_width=4)
    head.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=total, completed=state.step, complete_style="green", pulse=total is None)
    count = Text(str(state.step) if total is None else f"{state.step}/{total}", style="bold")
    head.add_row(Text(state.phase, style="cyan"), bar, count)
    line = Text(no_wrap=True, overflow="ellipsis")
    for label, value in facts(state):
        line.append("  " if line else "")
        line.append(f"{label} " if label else "", style="dim")
        line.append(value, style="bold green" if label == "reward" else "")
    return Group(head, line) if line else head
