import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from psrl.outcome import Outcome
from psrl.slurm.jobs import SubmittedJob
from psrl.slurm.queue import QueuedJob, QueueReading
from psrl.status import StatusError, Sweep, main, newest_place, watch
from psrl.telemetry.incidents import IncidentLog
from psrl.telemetry.member_status import MemberStatus, RunFacts, state_of
from psrl.telemetry.members import find_members, settings_text, short_keys
from psrl.telemetry.metrics import MetricsWriter
from psrl.telemetry.recent import StalenessTail, last_error, recent_rows
from psrl.telemetry.status_table import columns, fitting, hours_minutes, plain

pytestmark = pytest.mark.unit


class FakeQueue:
    """Stands in for Slurm: what it says is given; counts how often it is asked."""

    def __init__(self, *jobs, problem="", asked_at_s=2e9):
        self.reading = QueueReading({job.leader: job for job in jobs}, asked_at_s, problem)
        self.asked = 0

    def read(self):
        self.asked += 1
        return self.reading


def make_member(
    sweep, number, *overrides, steps=0, job=None, outcome=None, total=40, created="2026-11-29T10:00:00+00:00"
):
    path = sweep / str(number)
    for name in ("logs", "rendezvous", "ledger"):
        (path / name).mkdir(parents=True)
    entry = {"id": "ab12cd34", "dir": str(sweep), "number": number, "overrides": list(overrides)}
    (path / "run.json").write_text(json.dumps({"run_id": "x", "created": created, "sweep": entry}))
    (path / "config.yaml").write_text(f"trainer:\n  total_training_steps: {total or 'null'}\n")
    if steps:
        write_steps(path, range(1, steps + 1))
    if job:
        (path / "jobs.jsonl").write_text(json.dumps({"job_id": job, "submitted_at_s": 1e9, "after": None}) + "\n")
    if outcome:
        (path / "outcome.json").write_text(json.dumps(outcome))
    return path


def write_steps(path, steps):
    with MetricsWriter(path / "metrics.jsonl") as writer:
        for step in steps:
            writer.write(
                {
                    "training/global_step": step,
                    "critic/rewards/mean": step / 100,
                    "staleness/max": 2 if step == 3 else 1,
                    "perf/total_num_tokens": 1000,
                    "timing_s/step": 60.0,
                }
            )


def look(directory, queue=None):
    return {row.name: row for row in Sweep(directory, queue or FakeQueue()).look()}


# ---- members -------------------------------------------------------------------------------------------------------


def test_members_and_what_they_differ_in(tmp_path):
    for number, staleness in ((10, 1), (2, 0), (0, 0)):
        make_member(tmp_path, number, f"psrl.staleness={staleness}", "+seed=1", "run_dir=x", "note='a=b, c'")
    make_member(tmp_path, 11, "psrl.staleness=1", "++seed=2", "~note")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "multirun.yaml").write_text("")
    members = find_members(tmp_path)
    assert [member.name for member in members] == ["0", "2", "10", "11"]
    assert [dict(member.settings) for member in members[2:]] == [
        {"psrl.staleness": "1", "seed": "1", "note": "'a=b, c'"},
        {"psrl.staleness": "1", "seed": "2", "note": "removed"},
    ]
    assert find_members(tmp_path / "10")[0].number == 10 and find_members(tmp_path / "none") == []


def test_short_keys_stay_apart_and_mean_something():
    keys = ["psrl.staleness", "psrl.lmcache.enable", "psrl.tms.enable", "a.lr", "b.lr", "seed"]
    assert list(short_keys(keys).values()) == ["staleness", "lmcache.enable", "tms.enable", "a.lr", "b.lr", "seed"]
    assert settings_text({"psrl.staleness": "1", "optim.lr": ""}) == "staleness=1 lr=default"


# ---- the ends of files ---------------------------------------------------------------------------------------------


def test_recent_rows_reads_the_end_only_and_keeps_the_surviving_history(tmp_path):
    path = tmp_path / "metrics.jsonl"
    padding = "x" * 1000
    lines = [json.dumps({"training/global_step": step, "pad": padding}) for step in range(1, 501)]
    path.write_text("\n".join([*lines, *lines[497:499]]) + "\n" + lines[499][:50])  # resumed at 497, torn at 500
    assert [row["training/global_step"] for row in recent_rows(path, 3)] == [497, 498, 499]
    with path.open("r+b") as file:  # what lies before the end is never looked at
        file.write(b"\xff" * 100_000)
    assert [row["training/global_step"] for row in recent_rows(path, 200)] == list(range(300, 500))
    assert recent_rows(tmp_path / "none", 3) == []


def test_recent_rows_of_a_short_file(tmp_path):
    write_steps(tmp_path, [1, 2])
    assert len(recent_rows(tmp_path / "metrics.jsonl", 10)) == 2


def test_the_greatest_staleness_is_that_of_the_whole_run(tmp_path):
    tail = StalenessTail(tmp_path / "metrics.jsonl")
    assert tail.poll() is None
    write_steps(tmp_path, [1, 2])
    assert tail.poll() == 1
    write_steps(tmp_path, [3, 4])
    assert tail.poll() == 2 and tail.poll() == 2


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["2026-11-29T10:00:00.5Z r INFO fine"], None),
        (["2026-11-29T10:00:00.5Z r INFO fine", "Traceback ...", "torch.OutOfMemoryError: CUDA"], "torch.OutOfMemoryError: CUDA"),
        (["2026-11-29T10:00:00.5Z r ERROR a cause", "2026-11-29T10:00:01.5Z r INFO on"], "a cause"),
        (["ValueError: one", "ValueError: two"], "ValueError: two"),
        (["slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-29T10:00:00 ***"], "slurmstepd: error: *** STEP"),
        (["an Error: in the middle of words"], None),
    ],
)  # fmt: skip
def test_last_error(lines, expected):
    found = last_error("trainer-0", lines)
    assert (not found) if expected is None else f"trainer-0: {expected}" in found[0][1]


def test_a_broken_line_has_the_time_before_it():
    ((time_s, text),) = last_error("r", ["2026-11-29T10:00:00Z r INFO x", "KeyError: 'a'"])
    assert time_s == 1795946400.0 and text.endswith("r: KeyError: 'a'")


# ---- states --------------------------------------------------------------------------------------------------------


def job(after=None):
    return SubmittedJob(job_id="7", submitted_at_s=1000.0, after=after)


def queued(state, **more):
    return QueuedJob(leader="7", state=state, **more)


def outcome(status, attempt="7-0"):
    return Outcome(status=status, attempt=attempt)


AFTER, BEFORE = QueueReading(asked_at_s=1030.0), QueueReading(asked_at_s=999.0)
STATES = [
    # Slurm has the job
    (RunFacts(job=job()), queued("PENDING", reason="Priority"), AFTER, "PENDING Priority"),
    (RunFacts(job=job("5")), queued("PENDING", reason="Dependency"), AFTER, "PENDING Dependency on job 5"),
    (RunFacts(job=job()), queued("RUNNING", elapsed="1:02", nodes=("n1", "n[3-4]")), AFTER, "RUNNING 1:02 n1 n[3-4]"),
    (RunFacts(job=job(), outcome=outcome("interrupted")), queued("PENDING", reason="BeginTime", restarts=1), AFTER,
     "REQUEUED BeginTime"),
    # the verdict of the attempt before is still there until the next one has begun
    (RunFacts(job=job(), outcome=outcome("interrupted")), queued("RUNNING", elapsed="0:01", restarts=1), AFTER, "RUNNING 0:01"),
    (RunFacts(job=job(), outcome=outcome("failed")), queued("RUNNING", elapsed="0:01", restarts=1), AFTER, "RUNNING 0:01"),
    (RunFacts(job=job(), outcome=outcome("failed", "7-1")), queued("RUNNING", elapsed="0:09", restarts=1), AFTER, "failed "),
    (RunFacts(job=job(), outcome=outcome("completed")), queued("COMPLETING", elapsed="0:09"), AFTER, "completed "),
    (RunFacts(job=job(), outcome=outcome("interrupted")), queued("COMPLETING", elapsed="0:09"), AFTER, "COMPLETING 0:09"),
    # it has left the queue, or is not in it yet
    (RunFacts(job=job(), outcome=outcome("completed")), None, AFTER, "completed "),
    (RunFacts(job=job(), outcome=outcome("interrupted", "7-3")), None, AFTER, "interrupted "),
    (RunFacts(job=job()), None, AFTER, "no verdict its job has left the queue"),
    (RunFacts(job=job(), outcome=outcome("failed", "6-0")), None, AFTER, "no verdict its job has left the queue"),
    (RunFacts(job=job(), outcome=outcome("failed", "6-0")), None, BEFORE, "submitted "),
    (RunFacts(job=job()), None, QueueReading(asked_at_s=1030.0, problem="no squeue"), "submitted "),
    (RunFacts(job=job(), outcome=outcome("failed")), None, QueueReading(problem="no squeue"), "failed "),
    # here
    (RunFacts(launcher_lives=True), None, BEFORE, "running here "),
    (RunFacts(launcher_lives=True, outcome=outcome("interrupted", "2-ab")), None, BEFORE, "running here "),
    (RunFacts(launcher_lives=True, outcome=outcome("completed", "2-ab")), None, BEFORE, "completed "),
    (RunFacts(begun=True), None, BEFORE, "no verdict it does not run on this host"),
    (RunFacts(), None, BEFORE, "not started "),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "queued", "queue", "expected"), STATES)
def test_state(facts, queued, queue, expected):
    assert " ".join(state_of(facts, queued, queue)) == expected


def test_a_sweep_on_slurm(tmp_path):
    make_member(tmp_path, 0, "psrl.staleness=0", steps=30, job="10")
    make_member(tmp_path, 1, "psrl.staleness=1", job="12", steps=12)
    cause = "trainer-0 ended by\nsignal SIGKILL"
    make_member(
        tmp_path, 2, "psrl.staleness=2", job="14", outcome={"status": "failed", "cause": cause, "attempt": "14-2"}
    )
    IncidentLog(tmp_path / "0" / "logs", "s").write(
        role="instance", name="instance-1", cause="SIGKILL", restarting=True
    )
    running = QueuedJob(leader="10", state="RUNNING", elapsed="30:12", nodes=("n1", "n[3-4]"), restarts=1)
    queue = FakeQueue(running, QueuedJob(leader="12", state="PENDING", reason="BeginTime", restarts=1))
    sweep = Sweep(tmp_path, queue)
    first, second, third = sweep.look()
    assert (first.step, first.total_steps, first.reward, first.max_staleness) == (30, 40, 0.3, 2)
    assert (first.eta_s, first.restarts, first.requeues) == (600.0, 1, 1)
    assert first.tokens_per_s == pytest.approx(1000 / 60)
    assert first.trouble.endswith("instance-1 ended by SIGKILL, started again")
    assert (second.state, second.step, second.eta_s) == ("REQUEUED", 12, None)  # when it goes on nobody knows
    assert (third.state, third.trouble, third.requeues) == ("failed", "trainer-0 ended by signal SIGKILL", 2)
    assert queue.asked == 1  # for all members together


def test_slurm_is_not_asked_for_runs_that_have_no_job_or_a_verdict(tmp_path):
    make_member(tmp_path, 0, steps=3)
    make_member(tmp_path, 1, job="5", outcome={"status": "completed", "attempt": "5-0"})
    queue = FakeQueue(problem="no squeue")
    sweep = Sweep(tmp_path, queue)
    assert [row.state for row in sweep.look()] == ["no verdict", "completed"]
    assert (queue.asked, sweep.notice) == (0, "")
    make_member(tmp_path, 2, job="6")
    assert [row.state for row in sweep.look()][2] == "submitted"
    assert "no squeue" in sweep.notice


def test_a_local_run(tmp_path):
    path = make_member(tmp_path, 0, steps=1)
    start_time = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    mark = path / "rendezvous" / "launcher.pid"
    mark.write_text(f"{os.getpid()} {start_time}")
    assert look(path)["0"].state == "running here"
    mark.write_text(f"{os.getpid()} {int(start_time) - 1}")  # another process that had this pid
    assert look(path)["0"].state == "no verdict"


def test_torn_and_missing_files(tmp_path):
    path = make_member(tmp_path, 0, total=None)
    (path / "outcome.json").write_text('{"status": "comp')
    (path / "jobs.jsonl").write_text('{"job_id": "1')
    (path / "logs").rmdir()
    (path / "ledger").rmdir()
    row = look(tmp_path)["0"]
    assert (row.state, row.step, row.total_steps, row.reward, row.trouble) == ("not started", 0, None, None, "")


# ---- what is shown -------------------------------------------------------------------------------------------------


def row(name="0", state="RUNNING", **more):
    fields = {
        "run_dir": f"/s/{name}", "settings": {"psrl.staleness": name}, "job_id": "4242", "detail": "", "step": 7,
        "total_steps": 40, "reward": 0.5, "max_staleness": 1, "tokens_per_s": 1234.0, "eta_s": 90.0, "restarts": 0,
        "requeues": 0, "trouble": "",
    }  # fmt: skip
    return MemberStatus(name=name, state=state, **fields | more)


def test_plain_table():
    long = "trainer-0: RuntimeError: " + "x" * 500
    rows = [
        row("0", detail="1:02 n1 n[3-4]"),
        row("1", "failed", eta_s=None, trouble=long, settings={"psrl.staleness": ""}),
    ]
    lines = plain("/s", rows, "squeue is gone").splitlines()
    assert lines[1].split() == "# staleness job state step reward max stale tokens/s ETA details".split()  # noqa: SIM905
    assert lines[2].split() == ["0", "0", "4242", "RUNNING", "7/40", "0.5", "1", "1234", "0:02", "1:02", "n1", "n[3-4]"]
    assert lines[3].split() == ["1", "default", "4242", "failed", "7/40", "0.5", "1", "1234"]
    assert lines[4:] == ["2 members: 1 RUNNING, 1 failed", "squeue is gone", f"1: {long}"]


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_a_narrow_terminal_loses_the_least_important_columns_and_never_a_job(width):
    shown = [column.title for column in fitting(columns([row(restarts=1, requeues=2)]), width)]
    assert shown[:4] == ["#", "staleness", "job", "state"]
    gone = ["restarts", "requeues", "tokens/s", "max stale", "reward"]
    lost = [title for title in gone if title not in shown]
    assert lost == gone[: len(lost)] and (lost == []) == (width >= 100)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (1, "0:01"), (60, "0:01"), (3601, "1:01"), (360000, "100:00")]
)
def test_hours_minutes(seconds, text):
    assert hours_minutes(seconds) == text


# ---- watching ------------------------------------------------------------------------------------------------------


def states_until_the_end(*looks):
    """How many of these looks (states of the members, seconds since the start) a watch takes, 5 s apart."""
    now, seen = [0.0], []

    def one():
        states = looks[min(len(seen), len(looks) - 1)]
        seen.append(states)
        return [row(state=state) for state in states]

    def sleep(seconds):
        now[0] += seconds

    for _ in watch(one, 5.0, lambda: now[0], sleep):
        pass
    return len(seen), now[0]


def test_watch_ends_with_the_verdicts():
    assert states_until_the_end(["completed", "failed"]) == (1, 0.0)
    assert states_until_the_end(["RUNNING"], ["RUNNING"], ["interrupted"]) == (4, 15.0)
    # the next member of a local sweep appears when the last has ended
    assert (
        states_until_the_end(["running here"], ["completed"], ["completed", "running here"], ["completed"] * 2)[0] == 5
    )
    looks, seconds = states_until_the_end(["RUNNING"], ["no verdict"])
    assert seconds >= 90 and looks == 20
    assert states_until_the_end(["RUNNING"], ["no verdict"], ["completed"]) == (3, 10.0)


def run_status(*arguments, **kwargs):
    command = [sys.executable, "-m", "psrl.status", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def test_ctrl_c_ends_a_watch_without_a_traceback(tmp_path):
    make_member(tmp_path, 0, steps=3)
    process = run_status("--watch", tmp_path)  # SECONDS left out
    title, _, line = (process.stdout.readline() for _ in range(3))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and title.strip() == str(tmp_path) and "no verdict" in line


def test_a_terminal_is_refreshed_in_place(tmp_path):
    path = make_member(tmp_path, 0, "psrl.staleness=0", steps=3, job="123456789")
    screen, side = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "50", "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "psrl.status", str(tmp_path), "--watch", "1"]
    process = subprocess.Popen(command, stdout=side, stderr=side, env=env)
    os.close(side)
    shown = b""
    while b"submitted" not in shown:
        shown += os.read(screen, 65536)
    (path / "outcome.json").write_text(json.dumps({"status": "completed", "attempt": "123456789-0"}))
    try:
        while piece := os.read(screen, 65536):
            shown += piece
    except OSError:  # the other side is closed
        pass
    assert process.wait(60) == 0
    os.close(screen)
    text = shown.decode()
    assert "123456789" in text and "submitted" in text and "completed" in text and "there is no squeue" in text
    assert "\x1b[1A" in text  # the cursor went up to write over the last table


# ---- the command ---------------------------------------------------------------------------------------------------


def test_json_and_the_newest_place(tmp_path, capsys, monkeypatch):
    make_member(tmp_path / "multirun/2026-11-28/09-00-00", 0, created="2026-11-28T09:00:00+00:00")
    make_member(tmp_path / "multirun/2026-11-29/10-00-00", 0, "psrl.staleness=0", created="2026-11-29T09:00:01+00:00")
    run = make_member(tmp_path / "runs", 5, steps=2, created="2026-11-29T09:00:00+00:00")
    (tmp_path / "runs" / "notes.txt").write_text("not a run")
    monkeypatch.chdir(tmp_path)
    assert newest_place(tmp_path) == tmp_path / "multirun/2026-11-29/10-00-00"
    assert main(["--json"]) == 0
    out, err = capsys.readouterr()
    assert "multirun/2026-11-29/10-00-00 is the newest here" in err
    assert [(row["name"], row["state"]) for row in json.loads(out)] == [("0", "not started")]
    assert main(["--json", str(run)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["step"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "there is no directory"),
        (["."], "is neither a run nor a sweep"),
        ([], "there is no run below"),
        (["--watch", "0.1"], "--watch 0.1 is refused: give 1 to 86400 seconds"),
        (["--watch", "nan"], "--watch nan is refused"),
        ([".", "--watch", "soon"], "--watch soon is refused: give a number of seconds"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--json", "--watch"], "not allowed with argument"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    for number in range(300):
        make_member(tmp_path, number)
    process = run_status(tmp_path)
    process.stdout.close()
    assert process.wait(60) == 0 and process.stderr.read() == ""
    process.stderr.close()


def test_it_starts_light():
    code = "import psrl.status, sys; print([m for m in ('torch', 'matplotlib', 'omegaconf', 'rich', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_sweep_without_members_is_refused(tmp_path):
    with pytest.raises(StatusError, match="neither a run nor a sweep"):
        Sweep(tmp_path).look()
