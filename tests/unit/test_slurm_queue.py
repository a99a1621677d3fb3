"""Reading squeue: recorded outputs of Slurm 22.05, and a real child process for everything that can go wrong."""

import sys

import pytest

from psrl.config.errors import ConfigError
from psrl.slurm import queue
from psrl.slurm.queue import COMMAND, Queue, QueuedJob, parse_queue, queued_jobs

pytestmark = pytest.mark.unit

RUNNING = """\
6|N/A|N/A|PENDING|PartitionConfig|0|0:00||
7|N/A|N/A|PENDING|JobHeldUser|0|0:00||
5|N/A|N/A|RUNNING|None|0|0:07|n2|
4|3|1|PENDING|Dependency|0|0:00||
2|1|1|RUNNING|None|0|0:07|n[3-4]|
3|3|0|PENDING|Dependency|0|0:00||
1|1|0|RUNNING|None|0|0:07|n1|
"""
"""Two heterogeneous jobs of two components each (1 and, waiting for it, 3) among plain ones."""
JUST_REQUEUED = """\
2|1|1|PENDING|None|1|0:00||
1|1|0|COMPLETING|None|1|0:00|n1|
"""
REQUEUED = """\
2|1|1|PENDING|BeginTime|1|0:00||
1|1|0|PENDING|BeginTime|1|0:00||
"""
GOES_ON = """\
2|1|1|RUNNING|None|1|1-00:00:08|n[3-4]|
1|1|0|RUNNING|None|1|1-00:00:08|n1|
"""


def test_the_components_of_a_heterogeneous_job_are_one():
    jobs = parse_queue(RUNNING)
    assert sorted(jobs) == ["1", "3", "5", "6", "7"]
    assert jobs["1"] == QueuedJob(leader="1", state="RUNNING", elapsed="0:07", nodes=("n1", "n[3-4]"))
    assert jobs["3"] == QueuedJob(leader="3", state="PENDING", reason="Dependency", elapsed="0:00")
    assert jobs["5"].nodes == ("n2",) and jobs["7"].reason == "JobHeldUser"


@pytest.mark.parametrize(
    ("text", "job"),
    [
        (JUST_REQUEUED, QueuedJob(leader="1", state="COMPLETING", restarts=1, elapsed="0:00", nodes=("n1",))),
        (REQUEUED, QueuedJob(leader="1", state="PENDING", reason="BeginTime", restarts=1, elapsed="0:00")),
        (GOES_ON, QueuedJob(leader="1", state="RUNNING", restarts=1, elapsed="1-00:00:08", nodes=("n1", "n[3-4]"))),
    ],
)
def test_a_requeued_job(text, job):
    assert parse_queue(text) == {"1": job}


def test_lines_of_another_form_are_skipped():
    assert parse_queue("CLUSTER: facts\n\n" + GOES_ON).keys() == {"1"} and parse_queue("") == {}


def test_the_command_asks_for_what_is_parsed():
    assert COMMAND[:3] == ("squeue", "--me", "--noheader")
    assert COMMAND[4] == "JobID:|,HetJobID:|,HetJobOffset:|,State:|,Reason:|,RestartCnt:|,TimeUsed:|,NodeList:|"


def command(path, code):
    """A program that keeps count of its calls in a file beside it."""
    script = path / "fake.py"
    script.write_text(f"import os, sys, time\nopen({str(path / 'calls')!r}, 'a').write('x')\n{code}\n")
    return [sys.executable, str(script)]


def test_it_is_asked_at_most_every_30_s(tmp_path):
    now = [100.0]
    queue = Queue(command(tmp_path, f"print({GOES_ON!r})"), clock=lambda: now[0], wall=lambda: 1e9 + now[0])
    readings = []
    for now[0] in (100.0, 101.0, 129.9, 130.0, 131.0):
        readings.append(queue.read())
    assert (tmp_path / "calls").read_text() == "xx"
    assert [reading.asked_at_s for reading in readings] == [1e9 + 100] * 3 + [1e9 + 130] * 2
    assert readings[0].jobs["1"].restarts == 1 and readings[0].problem == ""


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "sys.exit('slurm_load_jobs error: Unable to contact slurm controller (connect failure)')",
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        ),
        ("sys.exit(3)", "ended with exit code 3"),
        ("time.sleep(60)", "gave no answer within 10 s"),
    ],
)
def test_a_failure_is_told_and_not_repeated_within_30_s(tmp_path, monkeypatch, code, problem):
    monkeypatch.setattr(queue, "DEADLINE_S", 10.0 if "sleep" in code else 60.0)
    asked = Queue(command(tmp_path, code))
    assert problem in asked.read().problem and asked.read().jobs == {}
    assert (tmp_path / "calls").read_text() == "x"


def test_no_squeue():
    assert Queue(["squeue-that-is-not-there"]).read().problem == "there is no squeue-that-is-not-there on this host"


def test_the_user_s_own_squeue_settings_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setenv("SQUEUE_STATES", "completed")
    monkeypatch.setenv("SLURM_CONF", "/somewhere")
    code = "sys.exit(os.environ.get('SQUEUE_STATES', '') + os.environ['SLURM_CONF'])"
    assert Queue(command(tmp_path, code)).read().problem == "/somewhere"


def test_queued_jobs_refuses_to_guess(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"Slurm's queue cannot be read: there is no squeue on this host\."):
        queued_jobs()
