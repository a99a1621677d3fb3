"""Framing, limits and addresses."""

from __future__ import annotations

import logging
import resource
import socket

import pytest

from psrl.net.addresses import bind_address, interface_address, own_address
from psrl.net.framing import MESSAGE, PING, PONG, STALE, BadFramesError, Codec, Drops, pack_header, unpack
from psrl.net.limits import descriptor_fault, descriptors_needed, raise_descriptor_limit
from psrl.protocol.control import FromCoordinator, GroupAck, Pull

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("kind", [PING, PONG, STALE])
def test_headers_carry_kind_and_epoch(kind: int) -> None:
    assert unpack([pack_header(kind, 2**40)]) == (kind, 2**40, None)
    assert unpack([pack_header(MESSAGE, 3), b"payload"]) == (MESSAGE, 3, b"payload")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"short"],
        [pack_header(MESSAGE, 1)],
        [pack_header(PING, 1), b"payload"],
        [pack_header(9, 1)],
        [pack_header(MESSAGE, 1), b"a", b"b"],
    ],
)
def test_frames_of_another_protocol_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadFramesError):
        unpack(frames)


def test_a_codec_decodes_its_own_messages_only() -> None:
    codec = Codec(FromCoordinator)
    assert codec.decode(codec.encode(GroupAck(groups=[4]))) == GroupAck(groups=[4])
    with pytest.raises(ValueError):
        Codec(Pull).decode(codec.encode(GroupAck(groups=[4])))


def test_drops_are_all_counted_and_logged_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    drops = Drops(logging.getLogger("test"), "server")
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            drops.note("an undecodable message")
    assert drops.counts == {"an undecodable message": 1000}
    assert len(caplog.records) == 10  # at 1, 2, 4, ... 512


@pytest.mark.parametrize(
    ("hard", "peers", "refused"),
    [
        (descriptors_needed(1000), 1000, False),
        (descriptors_needed(1000) - 1, 1000, True),
        (1024, 985, True),
        (resource.RLIM_INFINITY, 10**6, False),
    ],
)
def test_too_few_open_files_are_refused_with_both_numbers(hard: int, peers: int, refused: bool) -> None:
    fault = descriptor_fault(hard, peers)
    assert (fault is not None) is refused
    if fault:
        assert str(hard) in fault and str(peers) in fault


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_descriptor_limit(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        with pytest.raises(OSError, match="too small for 100000000 peers"):
            raise_descriptor_limit(10**8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_addresses_to_bind() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert bind_address(None, local=True) == "127.0.0.1"
    assert bind_address("lo", local=False) == "127.0.0.1"
    assert bind_address("10.1.2.3", local=False) == "10.1.2.3"
    with pytest.raises(OSError, match=r"psrl\.net\.interface=nope0: no such interface .* this host has .*lo"):
        bind_address("nope0", local=False)


@pytest.mark.parametrize(
    ("routed", "resolved", "expected"), [(True, "127.0.1.1", "10.9.8.7"), (False, "10.1.1.1", "10.1.1.1")]
)
def test_own_address_is_the_routed_one_else_the_resolved_one(
    monkeypatch: pytest.MonkeyPatch, routed: bool, resolved: str, expected: str
) -> None:
    pretend_network(monkeypatch, routed, resolved)
    assert own_address() == expected


def test_a_host_that_knows_itself_as_loopback_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_network(monkeypatch, routed=False, resolved="127.0.1.1")
    with pytest.raises(OSError, match=r"127\.0\.1\.1 only, .* set psrl\.net\.interface"):
        own_address()


def pretend_network(monkeypatch: pytest.MonkeyPatch, routed: bool, resolved: str) -> None:
    class Probe(socket.socket):
        def connect(self, address: object) -> None:
            if not routed:
                raise OSError("Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return ("10.9.8.7", 1)

    monkeypatch.setattr(socket, "gethostbyname", lambda name: resolved)
    monkeypatch.setattr(socket, "socket", Probe)
