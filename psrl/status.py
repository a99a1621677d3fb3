"""`python -m psrl.status [RUN_DIR | MULTIRUN_DIR]`: where each run of a sweep stands, from its directory and Slurm's queue."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from psrl.slurm.queue import Queue, QueueReading
from psrl.telemetry.member_status import NO_VERDICT, MemberReader, MemberStatus
from psrl.telemetry.members import Member, find_members
from psrl.telemetry.status_table import Screen

EXIT_REFUSED = 2
WATCH_S = 5.0
LOST_S = 90.0
"""`--watch` waits this long for the verdict of a job that has left the queue: a file that another node has written may
stay invisible for a minute on NFS."""


class StatusError(Exception):
    """One sentence for the user."""


class Sweep:
    """The members below a directory, read again at each look; Slurm is asked at most every 30 s for all of them."""

    def __init__(self, directory: Path, queue: Queue | None = None) -> None:
        self.directory = directory
        self._queue = Queue() if queue is None else queue
        self._readers: dict[Path, MemberReader] = {}
        self.notice = ""
        """Why Slurm tells nothing, if it does not."""

    def look(self) -> list[MemberStatus]:
        """Raises StatusError if there is no run."""
        members = find_members(self.directory)
        if not self.directory.is_dir():
            raise StatusError(f"there is no directory {self.directory}: give the one that psrl.launch printed")
        if not members:
            raise StatusError(
                f"{self.directory} is neither a run nor a sweep (it has no run.json, nor has any directory in it): "
                "give the directory that psrl.launch printed"
            )
        facts = [(member, self._reader(member).read()) for member in members]
        reading = self._queue.read() if any(fact.asks_slurm for _, fact in facts) else QueueReading()
        self.notice = (
            f"Slurm's queue is not known, states are from the run directories: {reading.problem}"
            if reading.problem
            else ""
        )
        return [fact.status(member, reading) for member, fact in facts]

    def _reader(self, member: Member) -> MemberReader:
        return self._readers.setdefault(member.path, MemberReader(member.path))


def newest_place(here: Path) -> Path:
    """The newest of ./multirun/*/* and ./runs/*, by when its runs were made. Raises StatusError if there is none."""
    found = [(_created(path), path) for path in [*here.glob("multirun/*/*"), *here.glob("runs/*")]]
    dated = [(created, path) for created, path in found if created]
    if not dated:
        raise StatusError(f"there is no run below {here}/multirun or {here}/runs: give the directory of a run or sweep")
    return max(dated)[1]


def watch(
    look: Callable[[], list[MemberStatus]],
    interval_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[MemberStatus]]:
    """Looks, with a pause between two, until every member has its verdict.

    All must still have one at the next look, since the next member of a local sweep is made only when the last has
    ended; a job that is gone without a verdict is given 90 s. A first look that finds nothing but verdicts is the only
    one.
    """
    quiet_since: float | None = None
    waited = False
    while True:
        rows = look()
        yield rows
        if all(row.settled for row in rows):
            quiet_since = clock() if quiet_since is None else quiet_since
            lost = any(row.state == NO_VERDICT for row in rows)
            if clock() - quiet_since >= (LOST_S if lost else interval_s if waited else 0.0):
                return
        else:
            quiet_since, waited = None, True
        sleep(interval_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, also for Ctrl-C; 2 for bad input."""
    try:
        directory, interval_s, as_json = _arguments(argv)
        if directory is None:
            directory = newest_place(Path.cwd())
            print(f"psrl.status: {directory.relative_to(Path.cwd())} is the newest here", file=sys.stderr)
        return _show(Sweep(directory.resolve()), interval_s, as_json)
    except (StatusError, PermissionError) as error:
        print(f"psrl.status: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 0


def _show(sweep: Sweep, interval_s: float | None, as_json: bool) -> int:
    if as_json:
        rows = sweep.look()
        if sweep.notice:
            print(f"psrl.status: {sweep.notice}", file=sys.stderr)
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    with Screen(str(sweep.directory), sys.stdout, live=interval_s is not None) as screen:
        if interval_s is None:
            screen.show(sweep.look(), sweep.notice)
            return 0
        for rows in watch(sweep.look, interval_s):
            screen.show(rows, sweep.notice)
    return 0


def _arguments(argv: Sequence[str] | None) -> tuple[Path | None, float | None, bool]:
    """(directory or None, seconds between looks or None, as JSON)."""
    parser = _Parser(
        prog="python -m psrl.status", description="Where each run of a sweep stands: Slurm state, step, reward, ETA."
    )
    parser.add_argument("directory", type=Path, nargs="?", help="of a run or a sweep; the newest below . if left out")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--watch",
        nargs="?",
        const=str(WATCH_S),
        metavar="SECONDS",
        help=f"look again every SECONDS (default {WATCH_S:g}) until every member has its verdict",
    )
    how.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args(argv)
    if args.watch is None:
        return args.directory, None, args.json
    try:
        interval_s = float(args.watch)
    except ValueError:
        if args.directory is not None:
            raise StatusError(f"--watch {args.watch} is refused: give a number of seconds") from None
        return Path(args.watch), WATCH_S, False  # `--watch DIR`
    if not 1.0 <= interval_s <= 86400.0:
        raise StatusError(f"--watch {args.watch} is refused: give 1 to 86400 seconds")
    return args.directory, interval_s, False


class _Parser(argparse.ArgumentParser):
    """One sentence instead of the usage."""

    def error(self, message: str) -> NoReturn:
        raise StatusError(f"{message}; --help tells more")


def _created(path: Path) -> str:
    return max((member.created for member in find_members(path)), default="")


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)
