"""The end of an attempt as its user sees it: summary, report, and the last words with the cause."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from psrl.outcome import FAILED, INTERRUPTED, Outcome
from psrl.rundir.layout import RunDir


def write_summary_and_report(run_dir: RunDir, page: bool) -> None:
    """summary.json and, with `page`, what it looks like; a failure here is told and changes no verdict."""
    from psrl.report import write_report, write_summary

    try:
        (write_report if page else write_summary)(run_dir)
    except Exception as error:  # the run itself is over: its verdict must not depend on a plot
        print(
            f"psrl: the report could not be made ({type(error).__name__}: {error}); try python -m psrl.report {run_dir.path}",
            file=sys.stderr,
        )


def conclude(run_dir: RunDir, outcome: Outcome, again: str) -> None:
    """The last words on the terminal or in the job's log: figures, verdict, cause, and `again`, how to go on."""
    if run_dir.summary.exists():
        summary: dict[str, Any] = json.loads(run_dir.summary.read_text())
        figures = {
            k: summary.get(k)
            for k in ("steps", "reward_first", "reward_last", "max_staleness", "tokens_per_s", "transport")
        }
        print("psrl: " + "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()))
    print(f"psrl: {outcome.status}{': ' + outcome.cause if outcome.cause else ''}")
    if outcome.status == FAILED:
        for line in last_errors(run_dir):
            print(f"  {line}")
        print(f"psrl: logs are in {run_dir.logs}")
    if outcome.status in (FAILED, INTERRUPTED):
        print(f"psrl: {again}")
    if (run_dir.report / "index.html").exists():
        print(f"psrl: report: {run_dir.report / 'index.html'}")


def last_errors(run_dir: RunDir, limit: int = 6) -> list[str]:
    """The last line of each log that holds an error."""
    found = []
    for log in sorted(run_dir.logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        wrong = [line for line in lines[-200:] if " ERROR " in line or re.match(r"\w*(Error|Exception)\b", line)]
        if wrong:
            found.append(f"{log.stem}: {wrong[-1][:300]}")
    return found[:limit]
