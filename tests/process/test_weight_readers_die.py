"""Readers that die while the trainer stands still: it must outlive them, or one dead instance would end the run."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from weight_world import DEADLINE_S, Process, World, publish

pytestmark = pytest.mark.process

TCP = {"UCX_TLS": "tcp"}
"""Both ends have to work at a read, so one that is under way stays so when the other end stops."""


def wait_stopped(publisher: Process) -> None:
    end = time.monotonic() + DEADLINE_S
    while psutil.Process(publisher.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_a_trainer_that_stood_still_outlives_a_reader_that_left_in_mid_read(world: World, how: str) -> None:
    """UCX would abort the trainer's process when it goes on and meets what it still owed to the dead one."""
    [publisher] = publishers = world.publishers("nixl", 1, mib=16, **TCP)
    publish(publishers, 0)
    reader = world.reader("nixl", 16, **TCP)
    assert reader.ask(pull=[0, 0, DEADLINE_S])["differing"] == []  # the two have met
    publish(publishers, 1)
    if how == "killed":
        reader.say(pull=[1, 0, DEADLINE_S], stop=publisher.pid)
        wait_stopped(publisher)
        reader.kill()
    else:
        assert "deadline" in reader.ask(pull=[1, 0, 2.0], stop=publisher.pid)["error"]
        assert reader.child.stdin is not None
        reader.child.stdin.close()
        reader.child.wait(DEADLINE_S)
    os.kill(publisher.pid, signal.SIGCONT)
    other = world.reader("nixl", 16, node="other", **TCP)
    assert other.ask(pull=[1, 0, DEADLINE_S])["differing"] == []
    publish(publishers, 2)
    assert other.ask(pull=[2, 0, DEADLINE_S])["differing"] == []
    assert publisher.child.poll() is None
