"""What an instance does before its engine starts with LMCache: find free addresses, set the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from psrl.config.lmcache import fetches_first
from psrl.role import Role
from psrl.rollout.lmcache_engine import EngineWithWorkers, TransferringEngine
from psrl.rollout.lmcache_orders import WorkerOrders
from psrl.rollout.lmcache_settings import PORTS_PER_RANK, LMCacheSettings, engines_ask, lmcache_settings, peer_address
from psrl.rundir.keys import load_keys

SHARE_TIMEOUT_S = 120.0
"""Registering a large tier for transfers takes seconds."""


def instance_lmcache(role: Role, ranks: int) -> LMCacheSettings | None:
    """Settings of this instance with `ranks` GPUs; None if LMCache is off. Raises ConfigError as `lmcache_settings`."""
    psrl = role.config.psrl
    if not psrl.lmcache.enable:
        return None
    transfer = psrl.rollout_coordination.routing_strategy.kv_transfer
    peer = None
    if engines_ask(psrl.lmcache, transfer):
        peer = peer_address(role.address, free_ports(role.address, PORTS_PER_RANK * ranks))
    return lmcache_settings(psrl.lmcache, transfer, instance=role.name, ranks=ranks, peer=peer)


def with_transfers(role: Role, engine: EngineWithWorkers) -> EngineWithWorkers:
    """`engine`, or in front of it what fetches a moved sample's keys and values first (kv_transfer sync and pin_sync)."""
    transfer = role.config.psrl.rollout_coordination.routing_strategy.kv_transfer
    if not fetches_first(transfer):
        return engine
    settings = {
        "run_dir": str(role.run_dir.path),
        "instance": role.name,
        "node": role.node,
        "address": role.address,
        "pin_at_once": transfer.transfer_mode == "pin_sync",
    }
    engine.call_workers("psrl_share_prefixes", settings, timeout_s=SHARE_TIMEOUT_S)
    return TransferringEngine(
        engine,
        WorkerOrders(engine.call_workers),
        run=load_keys(role.run_dir).server_public,
        timeout_s=transfer.transfer_timeout_ms / 1000,
    )


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
