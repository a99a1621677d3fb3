"""Whoever dies in the midst of a read, the trainer outlives it and the next reader is served."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from weight_role import kill_for_good, stop_for_good
from weight_world import DEADLINE_S, Process, World, publish

from psrl.weights.mode import nixl_available

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(nixl_available() is not None, reason=f"nixl: {nixl_available()}"),
]

TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
"""Both ends have to work at a read, so one that is under way stays so when the other end stops. One interface, as in a run."""
MIB = 16


@pytest.fixture
def publisher(world: World) -> Process:
    [publisher] = publishers = world.publishers("nixl", 1, MIB, **TCP)
    publish(publishers, 0)
    return publisher


def next_version(publisher: Process, version: int) -> None:
    publish([publisher], version)


def pulls(reader: Process, version: int) -> None:
    assert reader.ask(pull=[version, 0, DEADLINE_S])["differing"] == []


def pulls_from_the_next(reader: Process, version: int) -> None:
    """An attempt or two may meet a server that is going down."""
    for _ in range(3):
        answer = reader.ask(pull=[version, 0, DEADLINE_S])
        if answer.get("differing") == []:
            return
        assert answer["retryable"], answer
        time.sleep(0.2)
    raise AssertionError(answer)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while not gone(pid):
        assert time.monotonic() < end, f"process {pid} goes on"
        time.sleep(0.01)


def wait_stopped(pid: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_the_trainer_outlives_a_reader_that_left_an_unheard_question(
    world: World, publisher: Process, how: str
) -> None:
    """UCX aborts a process that answers a dead reader. That it does so here is why the trainer is not the one who answers."""
    reader = world.reader("nixl", MIB, **TCP)
    pulls(reader, 0)  # the two have met
    next_version(publisher, 1)
    server = publisher.server_pid()
    if how == "killed":
        reader.say(pull=[1, 0, DEADLINE_S], stop=server)
        wait_stopped(server)
        time.sleep(0.3)  # it asks for the next bytes meanwhile
        reader.kill()
    else:
        assert "deadline" in reader.ask(pull=[1, 0, 2.0], stop=server)["error"]
        assert reader.child.stdin is not None
        reader.child.stdin.close()
        reader.child.wait(DEADLINE_S)
    os.kill(server, signal.SIGCONT)
    other = world.reader("nixl", MIB, node="other", **TCP)
    pulls_from_the_next(other, 1)
    next_version(publisher, 2)
    pulls(other, 2)
    assert publisher.child.poll() is None


def test_what_a_killed_server_leaves_is_read_from_its_successor(world: World, publisher: Process) -> None:
    reader = world.reader("nixl", MIB, **TCP)
    pulls(reader, 0)
    next_version(publisher, 1)
    server = publisher.server_pid()
    failed = reader.ask(pull=[1, 0, DEADLINE_S], kill=server)
    assert failed["retryable"] and "deadline" not in failed["error"]
    pulls_from_the_next(reader, 1)
    assert publisher.server_pid() != server


def test_a_server_that_stands_still_is_ended_and_the_next_reader_gets_another(world: World, publisher: Process) -> None:
    """A reader asks again after a failed pull, as an instance does. What a server leaves unanswered gives it away."""
    reader = world.reader("nixl", MIB, **TCP)
    pulls(reader, 0)
    server = publisher.server_pid()
    stop_for_good(server)
    next_version(publisher, 1)
    end = time.monotonic() + DEADLINE_S
    while (answer := reader.ask(pull=[1, 0, 5.0])).get("differing") != []:
        assert answer["retryable"] and time.monotonic() < end, answer
        time.sleep(0.5)
    assert publisher.server_pid() != server and gone(server)


def test_a_server_that_cannot_start_refuses_the_pull_and_the_next_one_tries_again(
    world: World, publisher: Process
) -> None:
    publisher.ask(break_server=True)
    reader = world.reader("nixl", MIB, **TCP)
    failed = reader.ask(pull=[0, 0, DEADLINE_S])
    assert (
        failed["retryable"]
        and "host memory cannot be offered to other hosts: it has ended at once (exit code 1)" in failed["error"]
    )
    publisher.ask(break_server=False)
    pulls(reader, 0)


def test_reads_go_on_while_the_trainer_stands_still(world: World, publisher: Process) -> None:
    reader = world.reader("nixl", MIB, **TCP)
    pulls(reader, 0)
    next_version(publisher, 1)
    assert reader.ask(pull=[1, 0, DEADLINE_S], stop=publisher.pid)["differing"] == []
    os.kill(publisher.pid, signal.SIGCONT)
    next_version(publisher, 2)
    pulls(reader, 2)


@pytest.mark.parametrize("how", ["is killed", "ends"])
def test_the_server_ends_with_its_trainer(world: World, publisher: Process, how: str) -> None:
    reader = world.reader("nixl", MIB, **TCP)
    pulls(reader, 0)
    server = publisher.server_pid()
    os.kill(server, signal.SIGTERM)  # as a whole job step is told
    pulls(world.reader("nixl", MIB, node="other", **TCP), 0)
    assert publisher.server_pid() == server
    if how == "is killed":
        kill_for_good(publisher.pid)
    else:
        assert publisher.child.stdin is not None
        publisher.child.stdin.close()
        assert publisher.child.wait(DEADLINE_S) == 0
    wait_gone(server)


def test_a_server_that_stands_still_does_not_hold_up_its_trainers_end(world: World, publisher: Process) -> None:
    pulls(world.reader("nixl", MIB, **TCP), 0)
    server = publisher.server_pid()
    stop_for_good(server)
    assert publisher.child.stdin is not None
    publisher.child.stdin.close()
    assert publisher.child.wait(DEADLINE_S) == 0
    assert gone(server)
