"""Which address to bind. Everything that listens binds to one chosen address, never to all of them."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


def bind_address(interface: str | None, local: bool) -> str:
    """IPv4 address to bind to. `interface` (`psrl.net.interface`) is an interface's name or an address of this host;
    None means loopback for a local run, else the address under which other nodes reach this one.

    Raises OSError naming the key if there is no such interface or address.
    """
    if interface is None:
        return _LOOPBACK if local else own_address()
    try:
        return str(ipaddress.IPv4Address(interface))
    except ValueError:
        return interface_address(interface)


def interface_address(name: str) -> str:
    """IPv4 address of the network interface `name`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            names = ", ".join(sorted(known for _, known in socket.if_nameindex()))
            raise OSError(
                f"psrl.net.interface={name}: no such interface with an IPv4 address here ({error.strerror}); "
                f"this host has {names}"
            ) from None
    return socket.inet_ntoa(reply[20:24])


def interface_of(address: str) -> str:
    """Name of the network interface that has `address`. Raises OSError if none has."""
    for _, name in socket.if_nameindex():
        try:
            if interface_address(name) == address:
                return name
        except OSError:  # one without an IPv4 address
            continue
    raise OSError(f"no network interface of this host has the address {address}: set psrl.net.interface")


def own_address() -> str:
    """The address of the default route, else what the host's name resolves to. No packet is sent.

    Raises OSError if both give loopback only.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: connecting UDP only looks up the route
            address = probe.getsockname()[0]
        except OSError:
            address = _resolved_host_name()
    if ipaddress.IPv4Address(address).is_loopback or address == "0.0.0.0":
        raise OSError(
            f"this host knows itself as {address} only, which other nodes cannot reach: set psrl.net.interface"
        )
    return address


def _resolved_host_name() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return _LOOPBACK
