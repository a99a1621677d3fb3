"""Server and clients over real sockets: who gets in, what is dropped, how a loss is noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from psrl.net.client import AsyncClient, Client
from psrl.net.framing import MESSAGE, pack_header
from psrl.net.server import Server
from psrl.net.waiting import Wakeup, wait
from psrl.protocol.control import FromCoordinator, GroupAck, Hello, ToCoordinator, WantBuffer
from psrl.rundir.keys import RunKeys, new_keys

pytestmark = pytest.mark.process

DEADLINE_S = 30.0
KEYS = new_keys()


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    """Closes what a test opens, servers last."""
    parts: list[Any] = []

    def open_(part: Any) -> Any:
        parts.append(part)
        return part

    yield open_
    for part in reversed(parts):
        part.close(0.0)


def server(**changes: Any) -> Server:
    settings: dict[str, Any] = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 1.0, "peers": 8, **changes}
    return Server(KEYS, "127.0.0.1", ToCoordinator, greeting=Hello, **settings)


def client(keys: RunKeys = KEYS, name: str = "trainer", **changes: float) -> Client:
    settings = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 1.0, **changes}
    return Client(keys, FromCoordinator, name=name, **settings)


def until(condition: Callable[[], Any], *polls: Callable[[], Any]) -> Any:
    """Poll until `condition` gives something; fails at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, "the deadline has passed"
        for poll in polls:
            poll()
    return value


def connected(target: Server, **settings: Any) -> Client:
    one = client(**settings)
    one.connect(target.endpoint)
    until(lambda: one.established, lambda: one.poll(0.1))
    return one


def hello(name: str = "trainer") -> Hello:
    return Hello(role="trainer", name=name, node="n1", pid=1, sent_s=0.0)


def receive(target: Server | Client) -> Any:
    return until(lambda: target.poll(0.1))


def test_messages_go_both_ways_and_big_ones_too(opened) -> None:
    listening = opened(server())
    one = opened(connected(listening))
    one.send(hello("x" * 1_000_000))
    ((peer, message),) = receive(listening)
    assert message == hello("x" * 1_000_000) and peer.startswith(b"trainer.")
    assert listening.send(peer, GroupAck(groups=[3]))
    assert receive(one) == [GroupAck(groups=[3])]


def test_three_servers_at_once_have_three_endpoints(opened) -> None:
    servers = [opened(server()) for _ in range(3)]
    assert len({one.endpoint for one in servers}) == 3
    for one in servers:
        opened(connected(one)).send(hello())
        assert len(receive(one)) == 1


def test_a_preferred_port_is_taken_if_free_and_another_one_if_not(opened) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        occupied = other.getsockname()[1]
        first = opened(server(preferred_port=occupied))
        assert not first.endpoint.endswith(f":{occupied}")
        opened(connected(first))
    second = opened(server(preferred_port=occupied))
    assert second.endpoint.endswith(f":{occupied}")


def test_an_address_that_is_not_of_this_host_is_a_clear_error() -> None:
    with pytest.raises(OSError, match=r"coordinator cannot listen on 192\.0\.2\.1.*psrl\.net\.interface"):
        Server(KEYS, "192.0.2.1", ToCoordinator, name="coordinator")


def test_a_client_whose_key_is_not_on_the_list_gets_nothing_through(opened) -> None:
    listening = opened(server())
    stranger = new_keys()
    knows_the_server = msgspec.structs.replace(stranger, server_public=KEYS.server_public)
    one = opened(client(knows_the_server))
    one.connect(listening.endpoint)
    one.send(hello("stranger"))
    until(lambda: one.trouble, lambda: one.poll(0.05), lambda: listening.poll(0.05))
    assert "refused" in one.trouble and not one.established
    assert listening.allow_list.drops.counts["a client whose key is not on the list"] >= 1
    opened(connected(listening)).send(hello("friend"))  # the server lives on
    messages = receive(listening) + listening.poll(0.3)
    assert [message.name for _, message in messages] == ["friend"]


def test_a_client_without_any_key_gets_nothing_through(opened) -> None:
    listening = opened(server())
    context = zmq.Context()
    try:
        plain = context.socket(zmq.DEALER)
        plain.linger = 0
        plain.connect(listening.endpoint)
        plain.send_multipart([pack_header(MESSAGE, 0), msgspec.msgpack.encode(hello())])
        assert listening.poll(0.5) == []
    finally:
        context.destroy(linger=0)


def test_a_server_with_another_key_is_no_hang(opened) -> None:
    listening = opened(server())
    expects_another = msgspec.structs.replace(KEYS, server_public=new_keys().server_public)
    one = opened(client(expects_another))
    one.connect(listening.endpoint)
    until(lambda: one.trouble, lambda: one.poll(0.05), lambda: listening.poll(0.05))
    assert not one.established and one.server_silent_s() > 0


@pytest.mark.parametrize(
    "frames",
    [
        [b"x"],
        [b"", b"", b""],
        [pack_header(MESSAGE, 0), b"\xc1 not msgpack"],
        [pack_header(MESSAGE, 0), msgspec.msgpack.encode({"a": 1})],
        [pack_header(MESSAGE, 0), msgspec.msgpack.encode(GroupAck(groups=[1]))],
        [pack_header(MESSAGE, 0), b"\x91" * 100_000],
        [pack_header(MESSAGE, 0), b"\x98\xa5Hello\xa2\xff\xff"],
    ],
)
def test_garbage_of_an_admitted_client_is_counted_and_dropped(opened, frames: list[bytes]) -> None:
    listening = opened(server())
    one = opened(connected(listening))
    assert one._socket is not None
    one._socket.send_multipart(frames)
    until(lambda: listening.drops.counts["an undecodable message"], lambda: listening.poll(0.05))
    one.send(hello())
    assert [message for _, message in receive(listening)] == [hello()]


def test_only_a_greeting_is_taken_before_the_welcome_and_only_the_own_epoch_after(opened) -> None:
    silent = {"heartbeat_interval_s": 60.0, "heartbeat_timeout_s": 120.0}  # no heartbeat is counted among the messages
    listening = opened(server(epoch=5, **silent))
    one = opened(connected(listening, **silent))
    one.send(hello())
    ((peer, _),) = receive(listening)
    one.epoch = 5
    one.send(WantBuffer(buffer=1, incarnation=1))
    assert receive(listening) == [(peer, WantBuffer(buffer=1, incarnation=1))]
    for stale in (4, 6):
        one = opened(connected(listening, **silent))
        one.epoch = stale
        one.send(WantBuffer(buffer=2, incarnation=1))
        until(lambda one=one: one.broken, lambda: listening.poll(0.05), lambda one=one: one.poll(0.05))
        assert one.broken == "the server is in epoch 5 now"
        assert not one.send(hello())
    unwelcomed = opened(connected(listening, **silent))
    unwelcomed.send(WantBuffer(buffer=3, incarnation=1))
    until(lambda: unwelcomed.broken, lambda: listening.poll(0.05), lambda: unwelcomed.poll(0.05))
    assert listening.drops.counts["a message of another epoch"] == 3


def test_a_client_ignores_messages_of_another_epoch(opened) -> None:
    listening = opened(server(epoch=5))
    one = opened(connected(listening))
    one.send(hello())
    ((peer, _),) = receive(listening)
    one.epoch = 6
    listening.send(peer, GroupAck(groups=[1]))
    until(lambda: one.drops.counts["a message of another epoch"], lambda: one.poll(0.05))


def test_sending_to_a_peer_that_is_gone_is_told_and_reported_once(opened) -> None:
    listening = opened(server())
    one = connected(listening)
    one.send(hello())
    ((peer, _),) = receive(listening)
    one.close(0.0)
    until(lambda: not listening.send(peer, GroupAck(groups=[1])))
    assert listening.lost_peers() == [peer]
    assert not listening.send(peer, GroupAck(groups=[1]))
    assert listening.lost_peers() == [] and listening.peers() == []
    assert not listening.send(b"never seen", GroupAck(groups=[1]))
    assert listening.lost_peers() == []


CLIENT_PROCESS = """
    import sys, time
    from psrl.net.client import Client
    from psrl.protocol.control import FromCoordinator, Hello
    from psrl.rundir.keys import RunKeys
    keys = RunKeys(**dict(zip(("server_public", "server_secret", "client_public", "client_secret"), sys.argv[2:6])))
    client = Client(keys, FromCoordinator, name="busy", heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0)
    client.connect(sys.argv[1])
    while not client.established:
        client.poll(1.0)
    client.send(Hello(role="trainer", name="busy", node="n", pid=1, sent_s=0.0))
    time.sleep(600)  # a long computation: this loop polls no more
"""


@pytest.fixture
def busy_client() -> Iterator[Callable[[Server], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(listening: Server) -> subprocess.Popen[bytes]:
        arguments = [listening.endpoint, *msgspec.structs.astuple(KEYS)]
        started.append(subprocess.Popen([sys.executable, "-c", textwrap.dedent(CLIENT_PROCESS), *arguments]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_busy_peer_is_not_lost_but_a_killed_one_is(opened, busy_client) -> None:
    listening = opened(server())
    process = busy_client(listening)
    ((peer, _),) = receive(listening)
    until(lambda: listening.quiet_s(peer) > 3.0, lambda: listening.poll(0.1))  # three times the timeout
    assert listening.lost_peers() == []
    process.kill()
    assert until(listening.lost_peers, lambda: listening.poll(0.1)) == [peer]


def test_a_stopped_peer_is_lost_after_the_timeout(opened, busy_client) -> None:
    listening = opened(server())
    process = busy_client(listening)
    ((peer, _),) = receive(listening)
    os.kill(process.pid, signal.SIGSTOP)
    assert until(listening.lost_peers, lambda: listening.poll(0.1)) == [peer]


def test_the_last_words_of_a_server_arrive_before_its_loss_is_told(opened) -> None:
    listening = server()
    one = opened(connected(listening))
    one.send(hello())
    ((peer, _),) = receive(listening)
    for version in range(100):
        listening.send(peer, GroupAck(groups=[version]))
    listening.close(10.0)
    messages: list[Any] = []
    until(lambda: one.broken, lambda: messages.extend(one.poll(0.1)))
    assert messages == [GroupAck(groups=[version]) for version in range(100)]
    assert one.broken == "the connection was lost" and not one.send(hello())


def test_a_server_that_does_not_poll_is_seen_to_be_silent(opened) -> None:
    listening = opened(server())
    one = opened(connected(listening))
    until(lambda: one.server_silent_s() > 0.5, lambda: one.poll(0.1))
    until(lambda: one.server_silent_s() == 0.0, lambda: listening.poll(0.05), lambda: one.poll(0.05))


def test_time_in_which_the_client_did_not_poll_counts_against_nobody(opened) -> None:
    listening = opened(server())
    one = opened(connected(listening))
    one.poll(0.3)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        listening.poll(0.1)  # answers while the client computes
    one.poll(0.0)
    assert one.server_silent_s() < 0.5


def test_asyncio_receives_while_another_task_sends(opened) -> None:
    listening = opened(server())
    one = AsyncClient(client())
    opened(one)
    total = 2000

    async def serve(loop_done: asyncio.Event) -> None:
        while not loop_done.is_set():
            for peer, message in listening.poll(0.0):
                listening.send(peer, GroupAck(groups=[message.buffer]))
            await asyncio.sleep(0)

    async def send() -> None:
        for number in range(total):
            one.send(WantBuffer(buffer=number, incarnation=0))
            if number % 7 == 0:
                await asyncio.sleep(0)

    async def exchange() -> list[Any]:
        one.connect(listening.endpoint)
        while not one.client.established:
            await one.recv(1.0)
        done, received = asyncio.Event(), []
        tasks = [asyncio.create_task(serve(done)), asyncio.create_task(send())]
        while len(received) < total:
            received += await one.recv(DEADLINE_S)
        done.set()
        await asyncio.gather(*tasks)
        return received

    received = asyncio.run(asyncio.wait_for(exchange(), 2 * DEADLINE_S))
    assert received == [GroupAck(groups=[number]) for number in range(total)]


def test_one_wait_serves_sockets_and_signals(opened) -> None:
    first, second = opened(server()), opened(server())
    wakeup = Wakeup()
    one = opened(connected(second))
    one.send(hello())
    until(lambda: second.poll(0.0), lambda: wait([first, second, wakeup], 1.0))
    before = signal.signal(signal.SIGUSR1, lambda *_: wakeup.set())
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        until(wakeup.clear, lambda: wait([first, second, wakeup], 1.0))
        assert not wakeup.clear()
    finally:
        signal.signal(signal.SIGUSR1, before)
        wakeup.close()


def test_no_pickle_and_no_torch_come_with_the_transport(tmp_path: Path) -> None:
    code = "import sys, psrl.net.link, psrl.net.server; print({'torch', 'pickle'} & set(sys.modules) - before)"
    script = "import sys\nimport zmq, msgspec, asyncio\nbefore = set(sys.modules)\n" + code
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == "set()"
