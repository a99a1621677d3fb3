"""What an instance does before its engine starts with LMCache: find free addresses, set the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from psrl.role import Role
from psrl.rollout.lmcache_settings import PORTS_PER_RANK, LMCacheSettings, lmcache_settings, peer_address


def instance_lmcache(role: Role, ranks: int) -> LMCacheSettings | None:
    """Settings of this instance with `ranks` GPUs; None if LMCache is off. Raises ConfigError as `lmcache_settings`."""
    psrl = role.config.psrl
    if not psrl.lmcache.enable:
        return None
    peer = None
    if psrl.lmcache.enable_p2p:
        peer = peer_address(role.address, free_ports(role.address, PORTS_PER_RANK * ranks))
    transfer = psrl.rollout_coordination.routing_strategy.kv_transfer
    return lmcache_settings(psrl.lmcache, transfer, instance=role.name, ranks=ranks, peer=peer)


def free_ports(address: str, count: int) -> list[int]:
    """TCP ports of `address` that nobody has now. LMCache binds them a moment later and fails if another was faster."""
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.create_server((address, 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for processes that are started within, then put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
