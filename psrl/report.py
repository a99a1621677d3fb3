"""`python -m psrl.report RUN_DIR | MULTIRUN_DIR`: `summary.json` and the page `report/index.html` of a run, finished or
not; of a sweep `sweep.json` and a page that lays its members side by side."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from psrl.audit import AuditReport, audit
from psrl.coordinator.ledger import LedgerError, replay
from psrl.rundir.layout import RunDir
from psrl.rundir.publish import write_atomic
from psrl.telemetry.members import Member, is_run, sweep_members
from psrl.telemetry.page import render_page
from psrl.telemetry.record import RunRecord, configuration, load_run
from psrl.telemetry.sweep_page import render_sweep
from psrl.telemetry.sweep_record import load_sweep


def write_report(run_dir: RunDir) -> Path:
    """Write `summary.json` and `report/index.html`, and return the page's path.

    Works at any time of a run's life; doing it again replaces both. Raises FileNotFoundError, naming it, if there is no
    such run directory. A ledger that cannot be read is told on the page.
    """
    record = write_summary(run_dir)
    page = run_dir.report / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, render_page(record).encode())
    return page


def write_summary(run_dir: RunDir) -> RunRecord:
    """Write `summary.json` alone, and return what the page is drawn from."""
    record = load_run(run_dir.path, *_ledger(run_dir))
    write_atomic(run_dir.summary, json.dumps(record.summary, indent=1).encode() + b"\n")
    return record


def write_sweep_report(directory: Path, members: Sequence[Member]) -> Path:
    """Write `sweep.json` and `report/index.html` of a sweep, and the page of each member that has none; return the path
    of the sweep's page."""
    for member in members:
        if not (RunDir(member.path).report / "index.html").exists():
            write_report(RunDir(member.path))
    record = load_sweep(directory, members)
    page = directory / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    write_atomic(directory / "sweep.json", json.dumps(record.data(), indent=1).encode() + b"\n")
    write_atomic(page, render_sweep(record).encode())
    return page


def _ledger(run_dir: RunDir) -> tuple[dict[str, int], str | None]:
    """(counts for the summary, the audit's text); nothing if the run has not got as far as a ledger."""
    config, _ = configuration(run_dir.config)
    if not config or not run_dir.ledger.is_dir() or not any(run_dir.ledger.iterdir()):
        return {}, None
    entries, staleness = config["psrl.staleness_buffer_entries"], config["psrl.staleness"]
    try:
        report = audit(replay(run_dir.ledger), buffer_entries=entries, staleness=staleness)
    except (OSError, LedgerError) as error:
        return {}, f"the ledger cannot be read: {error}"
    return _counts(report), "\n".join(report.lines())


def _counts(report: AuditReport) -> dict[str, int]:
    counts = {f"groups_{fate}": report.fates[fate] for fate in ("trained", "dropped", "requeued")}
    counts["version"] = report.steps
    if report.max_lag is not None:
        counts["max_staleness"] = report.max_lag
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m psrl.report", description="Write the report of a run or sweep.")
    parser.add_argument("directory", type=Path, help="of a run, or of a sweep (it holds the runs' directories)")
    directory = parser.parse_args(argv).directory.resolve()
    try:
        members = [] if is_run(directory) else sweep_members(directory)
        print(write_sweep_report(directory, members) if members else write_report(RunDir(directory)))
    except FileNotFoundError as error:
        print(f"psrl.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
