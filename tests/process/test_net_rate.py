"""Messages through one coordinator-like loop, from many clients; run with -s to see the rate."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import msgspec
import pytest

from psrl.net.server import Server
from psrl.protocol.control import GroupAck, Hello, ToCoordinator, WantBuffer
from psrl.rundir.keys import new_keys

pytestmark = pytest.mark.process

CLIENTS = 20
MESSAGES = 1000  # of each client

CLIENT_PROCESS = """
    import sys, time
    from psrl.net.client import Client
    from psrl.net.limits import new_context
    from psrl.protocol.control import FromCoordinator, WantBuffer
    from psrl.rundir.keys import RunKeys
    endpoint, clients, messages = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    keys = RunKeys(**dict(zip(("server_public", "server_secret", "client_public", "client_secret"), sys.argv[4:8])))
    context = new_context(3 * clients)
    all_clients = [Client(keys, FromCoordinator, name=f"c{n}", context=context) for n in range(clients)]
    for client in all_clients:
        client.connect(endpoint)
    while not all(client.established for client in all_clients):
        for client in all_clients:
            client.poll(0.01)
    begin = time.monotonic()
    for number in range(messages):
        for client in all_clients:
            client.send(WantBuffer(buffer=number, incarnation=1))
    answers = {client.name: [] for client in all_clients}
    while not all(len(got) == messages for got in answers.values()):
        for client in all_clients:
            answers[client.name] += [message.groups[0] for message in client.poll(0.0)]
    print(time.monotonic() - begin)
    assert all(got == list(range(messages)) for got in answers.values())
"""


def test_every_message_of_many_clients_is_answered_in_order() -> None:
    keys = new_keys()
    server = Server(keys, "127.0.0.1", ToCoordinator, greeting=Hello, peers=CLIENTS)
    arguments = [server.endpoint, str(CLIENTS), str(MESSAGES), *msgspec.structs.astuple(keys)]
    argv = [sys.executable, "-c", textwrap.dedent(CLIENT_PROCESS), *arguments]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    served, deadline, cpu = 0, time.monotonic() + 120, time.thread_time()
    try:
        while process.poll() is None and time.monotonic() < deadline:
            messages = server.poll(0.1)
            for peer, message in messages:
                assert isinstance(message, WantBuffer)
                server.send(peer, GroupAck(groups=[message.buffer]))
            served += len(messages)
        busy = time.thread_time() - cpu
        output, _ = process.communicate(timeout=10)
    finally:
        process.kill()
        server.close(0.0)
    assert process.returncode == 0
    assert served == CLIENTS * MESSAGES
    print(f"\n{CLIENTS} clients, CURVE: {served / float(output):,.0f} messages/s sent, taken, answered and received;")
    print(f"the loop's thread spent {busy:.2f} s on them, enough for {served / busy:,.0f}/s")
