"""An agent loop's connections with rollout instances: who is there, requests to them, tokens from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.net.client import AsyncClient, Client
from psrl.net.limits import new_context, raise_descriptor_limit
from psrl.protocol.control import InstanceInfo
from psrl.protocol.generation import AbortRequest, GenerateRequest, TokenChunks
from psrl.role import Role
from psrl.rundir.keys import load_keys

log = logging.getLogger("psrl.agent_loop")

SOCKETS = 60_000
"""For the connections with instances, three each; how many of them may join, the coordinator decides."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True)
class Connection:
    """An instance as seen from here."""

    endpoint: str
    client: AsyncClient
    task: asyncio.Task[None]


class Connections:
    """One connection with each living instance. `on_chunks(instance, chunks)` is called with what arrives, `on_lost`
    once a connection is gone; `spawn` starts a task whose failure ends the process."""

    def __init__(
        self, role: Role, spawn: Spawn, on_chunks: Callable[[str, TokenChunks], None], on_lost: Callable[[str], None]
    ) -> None:
        self.name = role.name
        self.keys = load_keys(role.run_dir)
        self.limits = role.config.psrl.fault_tolerance
        raise_descriptor_limit(3 * role.config.psrl.deployment.n_rollout_instances)
        self.context = new_context(SOCKETS)
        self.spawn, self.on_chunks, self.on_lost = spawn, on_chunks, on_lost
        self._known: dict[str, Connection] = {}

    def send(self, instance: str, request: GenerateRequest | AbortRequest) -> bool:
        """False: there is no such instance now."""
        if connection := self._known.get(instance):
            connection.client.send(request)
        return connection is not None

    def has(self, instance: str) -> bool:
        return instance in self._known

    def names(self) -> list[str]:
        return list(self._known)

    def know(self, instances: Sequence[InstanceInfo]) -> None:
        """Connect with the living. One that is not listed left while this agent loop had no coordinator, or has not said
        hello to a new one yet: the connection tells which."""
        for name in self._known.keys() - {info.name for info in instances}:
            if not self._known[name].client.client.established:
                self._lose(name)
        for info in instances:
            known = self._known.get(info.name)
            if known is not None and (not info.alive or known.endpoint != info.endpoint):
                self._lose(info.name)
                known = None
            if known is None and info.alive:
                self._connect(info)

    def _connect(self, info: InstanceInfo) -> None:
        client = AsyncClient(
            Client(
                self.keys,
                TokenChunks,
                name=self.name,
                heartbeat_interval_s=self.limits.heartbeat_interval_s,
                heartbeat_timeout_s=self.limits.heartbeat_timeout_s,
                context=self.context,
            )
        )
        client.connect(info.endpoint)
        self._known[info.name] = Connection(info.endpoint, client, self.spawn(self._hear(info, client)))

    async def _hear(self, info: InstanceInfo, client: AsyncClient) -> None:
        """Until the connection is lost. Whether the instance itself is gone only the coordinator says; until then a new
        connection is tried, so that what is routed there meanwhile finds either it or, with that word, another place."""
        while client.client.broken is None and client.client.server_silent_s() <= self.limits.heartbeat_timeout_s:
            for message in await client.recv(1.0):
                self.on_chunks(info.name, message)
        trouble = client.client.broken or client.client.trouble or "it does not answer"
        log.info("connection to %s: %s", info.name, trouble)
        self._lose(info.name)
        self._connect(info)

    def _lose(self, name: str) -> None:
        connection = self._known.pop(name, None)
        if connection is None:
            return
        connection.client.close(0.0)
        if connection.task is not asyncio.current_task():
            connection.task.cancel()
        self.on_lost(name)
