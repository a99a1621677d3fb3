"""A role and its coordinator over real sockets and a real run directory; coordinators die by SIGKILL here."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from psrl.config.schema import FaultToleranceConfig
from psrl.net.link import AsyncCoordinatorLink, CoordinatorGoneError, CoordinatorLink
from psrl.net.server import Server
from psrl.protocol.control import GroupAck, Hello, Leaving, SupervisorState, ToCoordinator, WantBuffer, Welcome
from psrl.rundir.endpoints import Endpoint, publish_next_endpoint
from psrl.rundir.keys import create_keys
from psrl.rundir.layout import RunDir

pytestmark = pytest.mark.process

DEADLINE_S = 60.0
LIMITS = FaultToleranceConfig(hello_timeout_s=60.0, heartbeat_interval_s=0.1, heartbeat_timeout_s=10.0, fence_s=60.0)

COORDINATOR_PROCESS = """
    import os, sys, time
    from pathlib import Path
    from psrl.net.server import Server
    from psrl.protocol.control import GroupAck, Hello, ToCoordinator, WantBuffer, Welcome
    from psrl.rundir.endpoints import Endpoint, publish_next_endpoint
    from psrl.rundir.keys import load_keys
    from psrl.rundir.layout import RunDir
    run, epoch, port = RunDir(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    server = Server(load_keys(run), "127.0.0.1", ToCoordinator, epoch=epoch, greeting=Hello,
                    preferred_port=port or None, heartbeat_interval_s=0.1, heartbeat_timeout_s=10.0)
    if sys.argv[4] == "publish":
        endpoint = Endpoint(address=server.endpoint, node="n", pid=os.getpid(), epoch=epoch)
        publish_next_endpoint(run, "coordinator", endpoint)
    print(server.endpoint, flush=True)
    while True:
        for peer, message in server.poll(1.0):
            if isinstance(message, Hello):
                now = time.monotonic() + 1000 * epoch
                server.send(peer, Welcome(epoch=epoch, incarnation=1, hello_sent_s=message.sent_s, now_s=now))
                server.send(peer, GroupAck(groups=[len(message.state.children)]))
            elif isinstance(message, WantBuffer):
                server.send(peer, GroupAck(groups=[message.buffer]))
"""


class Coordinators:
    """Starts coordinators of one run as processes of their own."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.processes: list[subprocess.Popen[str]] = []
        self.endpoint = ""

    def start(self, epoch: int, port: int = 0, publish: str = "publish") -> subprocess.Popen[str]:
        arguments = [str(self.run_dir.path), str(epoch), str(port), publish]
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(COORDINATOR_PROCESS), *arguments], stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        assert process.stdout is not None
        self.endpoint = process.stdout.readline().strip()
        assert self.endpoint.startswith("tcp://")
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        for process in self.processes:
            self.kill(process)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def coordinators(tmp_path: Path) -> Iterator[Coordinators]:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    create_keys(run_dir)
    started = Coordinators(run_dir)
    yield started
    started.kill_all()


@pytest.fixture
def link(coordinators: Coordinators) -> Iterator[CoordinatorLink]:
    one = open_link(coordinators, LIMITS)
    yield one
    one.close()


def open_link(coordinators: Coordinators, limits: FaultToleranceConfig) -> CoordinatorLink:
    calls: list[str] = []

    def state() -> SupervisorState:
        calls.append("child")  # a snapshot that grows with each hello
        return SupervisorState(children=list(calls))

    return CoordinatorLink(coordinators.run_dir, "supervisor", "supervisor-0", state, limits)


def poll_until(link: CoordinatorLink, wanted: Callable[[Any], bool]) -> list[Any]:
    """Messages up to and including the first wanted one."""
    end, received = time.monotonic() + DEADLINE_S, []
    while not any(map(wanted, received)):
        assert time.monotonic() < end, f"only {received} came"
        received += link.poll(0.5)
    return received


def is_ack(message: Any) -> bool:
    return isinstance(message, GroupAck)


def test_hello_and_welcome_with_clock_offset(coordinators: Coordinators, link: CoordinatorLink) -> None:
    assert not link.send(WantBuffer(buffer=1, incarnation=1))
    coordinators.start(epoch=3)
    welcome = link.open()
    assert (welcome.epoch, link.epoch, link.connected) == (3, 3, True)
    # Both clocks are this host's, so the offset is what the coordinator added, up to the error that is stated.
    assert abs(link.clock_offset_s - 3000) <= link.clock_error_s
    assert poll_until(link, is_ack) == [GroupAck(groups=[1])]
    assert link.send(WantBuffer(buffer=7, incarnation=1))
    assert poll_until(link, is_ack) == [GroupAck(groups=[7])]


def test_a_coordinator_that_starts_late_is_waited_for(coordinators: Coordinators, link: CoordinatorLink) -> None:
    assert link.poll(1.5) == []
    coordinators.start(epoch=1)
    assert link.open().epoch == 1


@pytest.mark.parametrize("same_port", [False, True])
def test_after_sigkill_the_next_generation_is_found_and_told_everything(
    coordinators: Coordinators, link: CoordinatorLink, same_port: bool
) -> None:
    first = coordinators.start(epoch=1)
    link.open()
    assert poll_until(link, is_ack) == [GroupAck(groups=[1])]
    coordinators.kill(first)
    port = int(coordinators.endpoint.rpartition(":")[2]) if same_port else 0
    # With its old port back it is found although no new endpoint is seen (network filesystems cache directories).
    coordinators.start(epoch=2, port=port, publish="no" if same_port else "publish")
    welcome, ack = poll_until(link, is_ack)
    assert (welcome.epoch, ack) == (2, GroupAck(groups=[2]))
    assert abs(link.clock_offset_s - 2000) <= link.clock_error_s


def test_a_stopped_coordinator_is_replaced_by_a_newer_one(coordinators: Coordinators, link: CoordinatorLink) -> None:
    first = coordinators.start(epoch=1)
    link.open()
    poll_until(link, is_ack)
    os.kill(first.pid, signal.SIGSTOP)
    coordinators.start(epoch=2)
    assert poll_until(link, is_ack)[0].epoch == 2
    os.kill(first.pid, signal.SIGCONT)  # the orphan wakes up, and is not listened to
    assert link.poll(1.0) == []
    assert link.epoch == 2


def test_a_role_fences_itself_when_no_coordinator_comes_back(coordinators: Coordinators) -> None:
    link = open_link(coordinators, FaultToleranceConfig(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0, fence_s=2.0))
    coordinators.kill(coordinators.start(epoch=1))  # an endpoint of the past is no obstacle
    coordinators.start(epoch=2)
    link.open()
    coordinators.kill(coordinators.processes[-1])
    with pytest.raises(CoordinatorGoneError, match=r"fence_s=2\): (the connection was lost|nobody answers)"):
        while True:
            link.poll(0.5)
    link.close()


def test_a_role_that_never_meets_a_coordinator_says_so(coordinators: Coordinators) -> None:
    limits = FaultToleranceConfig(hello_timeout_s=1.0, heartbeat_interval_s=0.1)
    link = open_link(coordinators, limits)
    with pytest.raises(CoordinatorGoneError, match=r"hello_timeout_s=1\): no endpoint of the coordinator is published"):
        link.open()
    coordinators.kill(coordinators.start(epoch=1))
    limits.hello_timeout_s = 5.0
    link = open_link(coordinators, limits)
    with pytest.raises(CoordinatorGoneError, match="nobody answers at the endpoint"):
        link.open()


ROLE_PROCESS = """
    import sys
    from pathlib import Path
    from psrl.config.schema import FaultToleranceConfig
    from psrl.net.link import CoordinatorLink
    from psrl.rundir.layout import RunDir
    link = CoordinatorLink(RunDir(Path(sys.argv[1])), "agent", "agent-0", lambda: None, FaultToleranceConfig())
    link.open()
    link.close("done")
"""


def test_a_goodbye_arrives_although_the_process_ends_at_once(coordinators: Coordinators) -> None:
    run_dir = coordinators.run_dir
    server = Server(create_keys(run_dir), "127.0.0.1", ToCoordinator, epoch=1, greeting=Hello)
    publish_next_endpoint(run_dir, "coordinator", Endpoint(address=server.endpoint, node="n", pid=1, epoch=1))
    role = subprocess.Popen([sys.executable, "-c", textwrap.dedent(ROLE_PROCESS), str(run_dir.path)])
    end, received = time.monotonic() + DEADLINE_S, []
    while Leaving(reason="done") not in received and time.monotonic() < end:
        for peer, message in server.poll(0.5):
            received.append(message)
            if isinstance(message, Hello):
                server.send(peer, Welcome(epoch=1, incarnation=1, hello_sent_s=message.sent_s, now_s=0.0))
    assert role.wait(DEADLINE_S) == 0
    server.close(0.0)
    assert [type(message) for message in received] == [Hello, Leaving]


def test_an_asyncio_role_survives_a_coordinator_too(coordinators: Coordinators) -> None:
    async def role() -> list[int]:
        link = AsyncCoordinatorLink(coordinators.run_dir, "agent", "agent-0", SupervisorState, LIMITS)
        first = coordinators.start(epoch=1)
        epochs = [(await link.open()).epoch]
        assert await link.recv(DEADLINE_S) == [GroupAck(groups=[0])]
        link.send(WantBuffer(buffer=9, incarnation=1))
        assert await link.recv(DEADLINE_S) == [GroupAck(groups=[9])]
        coordinators.kill(first)
        coordinators.start(epoch=2)
        while len(epochs) < 2:
            epochs += [message.epoch for message in await link.recv(DEADLINE_S) if isinstance(message, Welcome)]
        link.close("done")
        return epochs

    assert asyncio.run(asyncio.wait_for(role(), 2 * DEADLINE_S)) == [1, 2]
