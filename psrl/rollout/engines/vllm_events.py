"""vLLM's KV events, from its core to the process that owns it: over sockets in a private directory, nothing that a network reaches.

The core numbers its batches and drops what a full socket cannot take. What is missing is asked for again, once; what the core no
longer has is reported as lost.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from psrl.protocol.generation import CacheEvents
from psrl.rollout.engines.vllm_blocks import VllmBlocks

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0
_END = (-1).to_bytes(8, "big", signed=True)
_MOST_QUEUED = 100_000


class InOrder:
    """Numbered batches in their order, whatever arrives when. Pure: time is passed in.

    >>> order = InOrder()
    >>> order.put(0, b"a"); order.put(2, b"c")
    >>> order.take(0.0), order.missing
    ([b'a'], 1)
    >>> order.put(1, b"b")
    >>> order.take(0.1), order.missing
    ([b'b', b'c'], None)
    """

    def __init__(self) -> None:
        self.missing: int | None = None
        """Number of the first batch that is missing although a later one is here."""
        self._next = 0
        self._early: dict[int, bytes] = {}
        self._give_up_s = 0.0

    def put(self, number: int, batch: bytes) -> None:
        if number >= self._next:
            self._early[number] = batch

    def no_more(self) -> None:
        """All has been sent again that there is: do not wait for what is still missing."""
        self._give_up_s = 0.0

    def take(self, now_s: float) -> list[bytes | None]:
        """What is due by now; None stands for batches that will never come."""
        due: list[bytes | None] = []
        while self._early:
            if self._next not in self._early:
                if self.missing != self._next:
                    self.missing, self._give_up_s = self._next, now_s + REPLAY_TIMEOUT_S
                    break
                if now_s < self._give_up_s:
                    break
                due.append(None)
                self._next = min(self._early)
            due.append(self._early.pop(self._next))
            self._next += 1
            self.missing = None
        return due


class KvEventFeed:
    """Make it before the core, so that nothing is missed; `options` are KVEventsConfig's for that core."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kv-", ignore_cleanup_errors=True)  # 0700
        endpoint, replay = (f"ipc://{Path(self._directory.name) / name}" for name in ("events", "replay"))
        self.options = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "hwm": _MOST_QUEUED,
        }
        self._context = zmq.Context()
        self._events = self._socket(zmq.SUB, endpoint)
        self._events.subscribe(b"")
        self._replay = self._socket(zmq.DEALER, replay)
        self._order = InOrder()
        self._asked: int | None = None

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _MOST_QUEUED)
        socket.connect(endpoint)
        return socket

    def take(self) -> list[tuple[float, list[Any]] | None]:
        """Batches that have come, in order: (when the core published it, on the wall clock of this host; its events). None
        stands for batches that were lost. Never blocks."""
        for frames in _arrived(self._events):
            self._order.put(int.from_bytes(frames[-2], "big"), frames[-1])
        for frames in _arrived(self._replay):
            if frames[-2] == _END:
                self._order.no_more()
            else:
                self._order.put(int.from_bytes(frames[-2], "big"), frames[-1])
        due = self._order.take(time.monotonic())
        if (missing := self._order.missing) != self._asked:
            self._asked = missing
            if missing is not None:
                self._replay.send_multipart([b"", missing.to_bytes(8, "big")], zmq.DONTWAIT)
        return [None if batch is None else tuple(msgspec.msgpack.decode(batch)[:2]) for batch in due]

    def waitables(self) -> Sequence[zmq.Socket[bytes]]:
        """Readable when `take` has something."""
        return [self._events, self._replay]

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._directory.cleanup()


class PrefixCacheNews:
    """What vLLM's prefix cache holds, in our names. Make it before the core."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of one of our blocks."""
        self.feed = KvEventFeed()
        self._blocks = VllmBlocks(block_size)
        self._since_s = 0.0
        """What was published before this is about keys and values that are void."""

    def hear(self) -> None:
        """Follow what has come; never blocks."""
        for batch in self.feed.take():
            if batch is None:
                log.warning("KV events of vLLM were lost: what it has cached is told again as it is used")
                self._blocks.lose()
            elif batch[0] >= self._since_s:
                for event in batch[1]:
                    self._blocks.hear(event)

    def all_void(self) -> None:
        """The cache has been emptied while nothing runs; vLLM itself says so with its next step."""
        self.hear()
        self._blocks.clear()
        self._since_s = time.time()

    def news(self) -> CacheEvents | None:
        self.hear()
        return self._blocks.held.news()


def _arrived(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    with contextlib.suppress(zmq.Again):
        while True:
            found.append(socket.recv_multipart(zmq.DONTWAIT))
    return found
