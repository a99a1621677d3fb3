"""What moves keys and values between instances within one worker: a thread of its own beside decoding."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from psrl.net.client import Client
from psrl.net.server import Server
from psrl.net.waiting import Wakeup, wait
from psrl.rollout.lmcache_messages import Have, PullEnd, PullOrder, ToSource
from psrl.rollout.lmcache_pulls import PrefixPulls
from psrl.rollout.lmcache_source import PrefixSource
from psrl.rollout.lmcache_tier import Tier
from psrl.rundir.endpoints import Endpoint, latest_endpoint, publish_next_endpoint
from psrl.rundir.keys import load_keys
from psrl.rundir.layout import RunDir
from psrl.weights.channel.nixl_agent import PROGRESS_S, TransferAgent, prepare_environment

log = logging.getLogger(__name__)


class PrefixExchange:
    """Made in each worker of an instance once LMCache is there; finds the others through the run directory."""

    def __init__(
        self, engine: Any, *, run_dir: RunDir, instance: str, node: str, address: str, pin_at_once: bool
    ) -> None:
        prepare_environment(address)
        self._run_dir, self._keys = run_dir, load_keys(run_dir)
        self._tier = Tier(engine)
        self._agent = TransferAgent(f"{endpoint_name(instance, self._tier.rank)}-{secrets.token_hex(6)}")
        self._agent.register(self._tier.memory)
        self._server = Server(self._keys, address, ToSource, name=endpoint_name(instance, self._tier.rank))
        self.source = PrefixSource(self._tier, self._agent, self._server)
        self._pulls = PrefixPulls(self._tier, self._agent, self._reach, pin_at_once=pin_at_once)
        self._orders: queue.SimpleQueue[PullOrder] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[PullEnd] = queue.SimpleQueue()
        self._wakeup, self._stopping = Wakeup(), False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-exchange", daemon=True)
        self._thread.start()
        here = Endpoint(address=self._server.endpoint, node=node, pid=os.getpid())
        atexit.register(self.close)  # a read that goes on must not lose its agent
        publish_next_endpoint(run_dir, endpoint_name(instance, self._tier.rank), here)

    def exchange(self, orders: Sequence[PullOrder]) -> list[PullEnd]:
        """Begin these; those that have ended since the last call. RuntimeError once nothing can be moved any more."""
        if self._failure is not None:
            raise RuntimeError(f"keys and values are not moved here any more: {self._failure}")
        for order in orders:
            self._orders.put(order)
        if orders:
            self._wakeup.set()
        return [self._ends.get() for _ in range(self._ends.qsize())]

    def close(self) -> None:
        """Doing it again is harmless."""
        self._stopping = True
        self._wakeup.set()
        self._thread.join()

    # ---- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except Exception as error:  # told to the instance at its next call
            self._failure = error
            log.exception("moving keys and values failed")
        self.source.close()
        self._server.close(0.0)
        if not self._pulls.close():
            self._agent.outlive_process([self._tier.memory])

    def _round(self) -> None:
        if self._pulls.reading or self.source.kept:
            time.sleep(PROGRESS_S)
        else:
            wait([self._server, self._wakeup, *self._pulls.clients()], max(0.0, min(60.0, self._pulls.due_in_s())))
            self._wakeup.clear()
        for _ in range(self._orders.qsize()):
            self._pulls.start(self._orders.get())
        self._pulls.poll()
        self.source.poll()
        for end in self._pulls.ended():
            self._ends.put(end)

    def _reach(self, instance: str) -> Client | None:
        found = latest_endpoint(self._run_dir, endpoint_name(instance, self._tier.rank))
        if found is None:
            return None
        client = Client(self._keys, Have, name=f"kv-{instance}")
        client.connect(found[1].address)
        return client


def endpoint_name(instance: str, rank: int) -> str:
    """Under which the run directory says where worker `rank` of an instance can be asked."""
    return f"kv-{instance}-{rank}"
