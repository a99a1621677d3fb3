import contextlib
import io
import os
import pty
import re

import pytest

from psrl.telemetry.progress import Progress, ProgressState, duration, plain_line

pytestmark = pytest.mark.unit


def row(step, reward=0.53, step_s=0.5, **more):
    return {
        "training/global_step": step,
        "critic/rewards/mean": reward,
        "staleness/mean": 0.8,
        "staleness/max": 1,
        "perf/throughput": 1234.4,
        "perf/time_per_step": step_s,
        **more,
    }


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (
            ProgressState(12, 100, 12, 0.53, 0.8, 1, 1234, 43),
            "step 12/100 version 12 reward 0.53 staleness 0.8/1 1234 tok/s eta 0:43",
        ),
        (ProgressState(12), "step 12"),
        (ProgressState(3, None, 3, tokens_per_s=10, alive=1, instances=2), "step 3 version 3 10 tok/s instances 1/2"),
    ],
)
def test_plain_line(state, line):
    assert plain_line(state) == line


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (43.4, "0:43"), (59.7, "1:00"), (3723, "1:02:03"), (-1, "0:00")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_plain_lines_are_few_and_the_last_step_is_told():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream, clock=clock)
    for step in range(1, 101):
        clock.now += 0.5
        progress.update(row(step))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 1/100 ") and lines[-1].startswith("step 100/100 ")
    assert len(lines) == 11
    assert "\x1b" not in stream.getvalue()


def test_close_tells_an_untold_step_once():
    stream = io.StringIO()
    progress = Progress(100, stream, clock=Clock())
    progress.update(row(1))
    progress.update(row(2))
    progress.close()
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/100", "2/100"]


def test_resumed_and_restarted_step_numbers():
    progress = Progress(100, io.StringIO(), clock=Clock())
    progress.update(row(60, step_s=2.0))
    assert progress.state.eta_s == 80.0  # from the pace of steps, not from step 1
    progress.update(row(41, step_s=2.0))  # the trainer went back to its checkpoint
    assert (progress.state.step, progress.state.eta_s) == (41, 118.0)
    progress.update(row(101, step_s=2.0))  # more than was asked for
    assert progress.state.eta_s == 0.0


def test_missing_figures_are_left_out():
    progress = Progress(None, io.StringIO(), clock=Clock())
    progress.update({"training/global_step": 1, "critic/rewards/mean": None})
    assert plain_line(progress.state) == "step 1 version 1"


def on_terminal(columns, monkeypatch, **environment):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24", **environment}.items():
        monkeypatch.setenv(name, value)
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        progress = Progress(100, stream, clock=Clock())
        progress.instances(1, 2)
        progress.update(row(12))
        progress.note("instance-1 died [signal SIGKILL], restarting")
        progress.close()
    text = b""
    with contextlib.suppress(OSError):  # EIO: all read, the other end is closed
        while True:
            text += os.read(leader, 65536)
    os.close(leader)
    return text.decode()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("columns", [120, 60, 30, 12])
def test_terminal_of_any_width(columns, monkeypatch):
    lines = plain(on_terminal(columns, monkeypatch)).replace("\r", "\n").split("\n")
    shown = [line for line in lines if line.strip() and "instance-1" not in line and "SIGKILL" not in line]
    assert shown and max(len(line) for line in shown if "12/100" in line or "reward" in line) <= columns


def test_terminal_shows_the_figures(monkeypatch):
    text = plain(on_terminal(120, monkeypatch))
    for piece in ("12/100", "reward 0.53", "staleness 0.8/1", "1234 tok/s", "eta 0:44", "version 12", "instances 1/2"):
        assert piece in text
    assert "[signal SIGKILL]" in text  # brackets are text here, not markup


def test_no_color(monkeypatch):
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", on_terminal(100, monkeypatch))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", on_terminal(100, monkeypatch, NO_COLOR="1"))
