"""`python -m psrl.telemetry.wandb_logger RUN_DIR`: follows a run's metrics file and logs it to Weights & Biases.

A process of its own, because a dashboard must never disturb the run: whatever goes wrong here is said in one line, and
the exit status is 0. It ends when the run's outcome appears, when its parent dies, or on SIGTERM.

Offline unless WANDB_MODE says otherwise; `wandb sync` uploads an offline run later. The run id is made once and kept in
the run directory, so that a requeued or resumed run goes on in the same W&B run. The members of a sweep are one group.
Each step is logged once: a resumed run trains the same groups in the same order again, so repeated steps say nothing
new (`metrics.jsonl` keeps the later).
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from psrl.telemetry.members import read_member
from psrl.telemetry.metrics import STEP_KEY, MetricsTail, Row
from psrl.telemetry.step_metrics import bucket_width
from psrl.telemetry.totals import Totals
from psrl.telemetry.wandb_file import highest_step
from psrl.telemetry.wandb_names import display_name, settings_in_sweep, sweep_config, tags
from psrl.telemetry.wandb_validation import ValidationLog

POLL_S = 1.0
FINISH_DEADLINE_S = 10.0
READ_DEADLINE_S = 90.0
"""A file that another node has just written may stay invisible for a minute on NFS."""
STARTS = 3
"""Most starts of W&B's process for one start of the run."""
CLEAN_END = b"end"
HISTOGRAMS: dict[str, Callable[[int], int]] = {
    "staleness/hist": lambda lag: 1,
    "response_length/hist": bucket_width,
}
"""Metrics that are counts by bucket, with the width of the bucket that begins at a value."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m psrl.telemetry.wandb_logger", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--once", action="store_true", help="log the steps that are there and end")
    parser.add_argument(
        "--finish-deadline-s", type=float, default=FINISH_DEADLINE_S, help="most time to upload at the end"
    )
    parser.add_argument("--starts-left", type=int, default=STARTS - 1, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    environment = dict(os.environ)  # without what W&B adds: the address of its process
    logging.basicConfig(level=logging.INFO, format="%(asctime)s wandb_logger %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    for ignored in (
        signal.SIGINT,
        signal.SIGUSR2,
    ):  # they reach the whole process group; the parent decides what they mean
        signal.signal(ignored, signal.SIG_IGN)
    ended = ending(args.run_dir, stop)  # before the slow import: an outcome that is there already is an earlier one
    try:
        log_run(args.run_dir, (lambda: True) if args.once else ended, stop, args.finish_deadline_s)
    except LostError as error:
        if args.starts_left > 0:
            logging.warning("%s; starting again", error)
            _start_again(args, environment, once=args.once or ended())
        logging.error("dashboard off: %s", error)
    except Exception as error:  # the one place where any failure is allowed to end here: the run must not feel it
        logging.error("dashboard off: %s", _in_a_line(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # wandb's threads and exit hooks may wait for a network for minutes


class LostError(Exception):
    """W&B's own process is gone."""


def _start_again(args: argparse.Namespace, environment: dict[str, str], once: bool) -> NoReturn:
    """Become a fresh logger, which finds out what the lost one has not passed on.

    A scheduler that takes a job's nodes sends SIGTERM to every process of the job; W&B's own dies of it at once."""
    command = [sys.executable, "-m", "psrl.telemetry.wandb_logger", str(args.run_dir)]
    command += ["--finish-deadline-s", str(args.finish_deadline_s), "--starts-left", str(args.starts_left - 1)]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the new one has a handler of its own
    os.execve(sys.executable, command + ["--once"] * once, environment)


def ending(run_dir: Path, stop: threading.Event) -> Callable[[], bool]:
    """A predicate: is it time to log what is left and leave? An outcome from before this moment does not count."""
    path = run_dir / "outcome.json"
    earlier = _content(path)
    parent = os.getppid()

    def ended() -> bool:
        nonlocal earlier
        outcome = _content(path)
        if outcome is None:
            earlier = None  # the launcher took the old one away: the next one counts, whatever it says
        return stop.is_set() or os.getppid() != parent or (outcome is not None and outcome != earlier)

    return ended


def log_run(run_dir: Path, ended: Callable[[], bool], stop: threading.Event, finish_deadline_s: float) -> None:
    """Log each step of `metrics.jsonl` that was not logged before until `ended`, then what was written before that.

    Raises LostError if W&B's process was there and is no more."""
    offline = os.environ.setdefault("WANDB_MODE", "offline") == "offline"
    if offline:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # no network at all
    run = start_run(run_dir, offline)
    logging.info("logging to W&B run %s (%s)", run.id, os.environ["WANDB_MODE"])
    try:
        cursor = StepCursor(
            run_dir / "logs" / f"wandb_steps.{run.id}",
            (lambda: highest_step(run_dir / "logs" / "wandb", run.id)) if offline else (lambda: run.starting_step - 1),
        )
        tails = MetricsTail(run_dir / "metrics.jsonl"), MetricsTail(run_dir / "validation.jsonl")
        follow(run, *tails, cursor, ended, stop)
        if _within(finish_deadline_s, run.finish):
            cursor.finish()
            return
    except Exception as error:
        raise LostError(f"W&B's process is lost ({_in_a_line(error)})") from error
    logging.warning("W&B was not done within %.0f s; `wandb sync %s` sends the rest", finish_deadline_s, run.dir)


def start_run(run_dir: Path, offline: bool) -> Any:
    """The `wandb.Run` of this run directory: always the same id, in the group of its sweep."""
    import wandb

    config = resolved_config(run_dir / "config.yaml")
    member = read_member(run_dir.resolve())
    settings = settings_in_sweep(member)
    trainer = config.get("trainer") or {}
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=trainer.get("project_name") or "psrl",
        name=trainer.get("experiment_name") or display_name(member, settings),
        group=member.sweep or None,
        job_type="train",
        tags=tags(settings),
        id=run_id(run_dir),
        resume=None if offline else "allow",  # offline there is nobody to ask; the same id joins the parts when synced
        dir=str(run_dir / "logs"),
        config=config | sweep_config(settings, config),
        settings=wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=offline, init_timeout=60
        ),
    )
    run.define_metric(STEP_KEY)
    run.define_metric("*", step_metric=STEP_KEY)
    return run


def follow(
    run: Any,
    tail: MetricsTail,
    validation_tail: MetricsTail,
    cursor: StepCursor,
    ended: Callable[[], bool],
    stop: threading.Event,
) -> None:
    """Log new rows as they come until `ended`, and then those written just before."""
    import wandb

    totals, validations, over = Totals(), ValidationLog(run), False
    while True:
        validations.add(validation_tail.poll())
        for row in cursor.new(map(totals.with_totals, tail.poll())):
            run.log(wandb_row(row, wandb.Histogram), step=row[STEP_KEY])
            cursor.advance(row[STEP_KEY])
            validations.log(cursor.highest)
        validations.log(cursor.highest)
        if over:
            return
        over = ended()
        if not over:
            stop.wait(POLL_S)


def wandb_row(row: Mapping[str, Any], histogram: Callable[..., Any]) -> dict[str, Any]:
    """The row as W&B takes it: nulls left out, counts by bucket as `histogram(np_histogram=(counts, edges))`."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if key in HISTOGRAMS:
            if value:
                out[key] = histogram(np_histogram=histogram_arrays(value, HISTOGRAMS[key]))
        elif value is not None:
            out[key] = value
    return out


def histogram_arrays(counts: Mapping[str, int], width: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """(counts, edges) with one more edge than counts; gaps between buckets get a count of 0.

    `histogram_arrays({"0": 3, "2": 1}, lambda _: 1) == ([3, 0, 1], [0, 1, 2, 3])`
    """
    filled: list[int] = []
    edges: list[int] = []
    for lower, count in sorted((int(bucket), count) for bucket, count in counts.items()):
        if edges and edges[-1] < lower:
            filled.append(0)
            edges.append(lower)
        elif not edges:
            edges.append(lower)
        filled.append(count)
        edges.append(lower + width(lower))
    return filled, edges


def run_id(run_dir: Path) -> str:
    """This run's W&B id: made by whoever comes first, published once as `rendezvous/wandb_id`, never changed."""
    path = run_dir / "rendezvous" / "wandb_id"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".wandb_id.{secrets.token_hex(4)}")
    draft.write_text(secrets.token_hex(4) + "\n")
    try:
        os.link(draft, path)  # exclusive: fails if the name exists, and never shows a half-written file
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    deadline = time.monotonic() + READ_DEADLINE_S
    while not (text := (_content(path) or b"").decode().strip()):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{path} exists but stays empty for {READ_DEADLINE_S:.0f} s; delete it to get a new W&B run"
            )
        time.sleep(0.5)
    return text


def resolved_config(path: Path) -> dict[str, Any]:
    """The resolved configuration of the run; empty if there is none."""
    from omegaconf import OmegaConf

    if not path.exists():
        return {}
    container = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    return {str(key): value for key, value in container.items()} if isinstance(container, dict) else {}


class StepCursor:
    """The highest step that went to W&B, remembered over restarts in an append-only file.

    What was logged is with W&B for certain only after a clean end. After any other one, `held()` tells the highest step
    that W&B has: what a killed process had not passed on is logged again.
    """

    def __init__(self, path: Path, held: Callable[[], int]) -> None:
        self._path = path
        lines = (_content(path) or b"").split()
        ends = [index for index, line in enumerate(lines) if line == CLEAN_END]
        safe, self._highest = (_greatest(part) for part in (lines[: ends[-1]] if ends else [], lines))
        if self._highest > safe:
            self._highest = max(safe, min(held(), self._highest))

    def new(self, rows: Iterable[Row]) -> Iterable[Row]:
        """The rows beyond the highest step, in order; asked row by row, so that `advance` in between counts."""
        return (row for row in rows if row[STEP_KEY] > self._highest)

    @property
    def highest(self) -> int:
        return self._highest

    def advance(self, step: int) -> None:
        self._highest = step
        self._append(str(step).encode())

    def finish(self) -> None:
        """A clean end: W&B has it all."""
        self._append(CLEAN_END)

    def _append(self, line: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(b"\n" + line + b"\n")  # the first newline ends what a killed writer may have left


def _greatest(lines: Iterable[bytes]) -> int:
    return max((int(line) for line in lines if line.isdigit()), default=0)


def _within(seconds: float, work: Callable[[], object]) -> bool:
    """Run `work` in a thread that may be left behind; whether it ended in time. Raises what it raised."""
    raised: list[Exception] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    return not thread.is_alive()


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
