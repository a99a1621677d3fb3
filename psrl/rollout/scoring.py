"""Rewards for an asyncio process: scoring children, a deadline for every sample, replacement of a child that hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Self

import msgspec

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.rollout.score_result import ScoreResult
from psrl.rollout.score_worker import ERROR, FRAME, READY, WRONG_TYPE, Reply, ScoringSpec
from psrl.supervisor.process import describe_exit
from psrl.tasks.base import Answer
from psrl.tasks.registry import task_spec

log = logging.getLogger(__name__)

TIMEOUT = "timeout"
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
"""A scoring process scores one sample at a time; threads would only take address space and cores."""


class RewardTypeError(Exception):
    """The reward function returned something that is no number: a mistake that no retry cures. Names the function."""


class _GoneError(Exception):
    """The child closed its channel."""


class _Child:
    """One scoring process and the frames to and from it."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._received = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Reply)

    @classmethod
    async def launch(cls, spec: ScoringSpec) -> Self:
        """Start the process and wait until it is ready. Raises ConfigError with what it says if it cannot be."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "psrl.rollout.score_worker", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | SINGLE_THREAD,
            start_new_session=True,  # what user code starts is killed together with it
        )
        child = cls(process)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await child.send(spec)
                reply = await child.receive()
        except TimeoutError:
            await child.kill()
            raise ConfigError(f"A scoring process was not ready within {START_TIMEOUT_S:.0f} s: see the log.") from None
        except _GoneError:
            cause = await child.kill()
            raise ConfigError(
                f"A scoring process ended by {cause} before it was ready: see the log, or raise "
                f"reward.max_memory_gb={spec.max_memory_gb}."
            ) from None
        except BaseException:
            await child.kill()
            raise
        if reply.kind != READY:
            await child.kill()
            raise ConfigError(reply.text or f"A scoring process said {reply.kind}.")
        return child

    async def send(self, message: object) -> None:
        body = msgspec.msgpack.encode(message)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(FRAME.pack(len(body)) + body)
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise _GoneError from error

    async def receive(self) -> Reply:
        """The next reply; several that arrived together are taken from memory."""
        assert self._process.stdout is not None
        while True:
            if len(self._received) >= FRAME.size:
                end = FRAME.size + FRAME.unpack_from(self._received)[0]
                if len(self._received) >= end:
                    reply = self._decoder.decode(self._received[FRAME.size : end])
                    del self._received[:end]
                    return reply
            data = await self._process.stdout.read(65536)
            if not data:
                raise _GoneError
            self._received += data

    async def kill(self) -> str:
        """End it and what it started; returns how it ended."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                return describe_exit(await self._process.wait())
        except TimeoutError:
            return f"nothing yet (process {self._process.pid} does not die)"


class ScoringPool:
    """`num_workers` scoring processes. Several groups may be scored at once; each group is one message to one process.

    async with ScoringPool.from_config(config) as pool:
        results = await pool.score(answers)
    """

    def __init__(self, spec: ScoringSpec, num_workers: int, timeout_s: float):
        """`timeout_s` is the deadline of one sample, counted from the end of the sample before it."""
        if num_workers < 1:
            raise ConfigError(f"reward.num_workers={num_workers}: at least one scoring process is needed.")
        self._spec, self._num_workers, self._timeout_s = spec, num_workers, timeout_s
        self._idle: asyncio.Queue[_Child | None] = asyncio.Queue()
        self._exchanges: set[asyncio.Task[list[ScoreResult]]] = set()
        self.counters: Counter[str] = Counter()
        """Samples by kind of their result, and "replaced": processes that hung or died."""

    @classmethod
    def from_config(cls, config: Config) -> Self:
        return cls(scoring_spec(config), config.reward.num_workers, config.reward.timeout_s)

    async def start(self) -> None:
        """Start all processes. Raises ConfigError with one sentence if reward function or task cannot be built."""
        launches = (_Child.launch(self._spec) for _ in range(self._num_workers))
        started = await asyncio.gather(*launches, return_exceptions=True)
        for child in started:
            if isinstance(child, _Child):
                self._idle.put_nowait(child)
        if failure := next((c for c in started if isinstance(c, BaseException)), None):
            await self.close()
            raise failure

    async def score(self, answers: Sequence[Answer]) -> list[ScoreResult]:
        """One result an answer, in order; one bad sample does not touch the others.

        Raises RewardTypeError if the function returns no number. Cancelling the call lets the exchange in progress
        finish by its deadlines, so the process behind it stays in step.
        """
        exchange = asyncio.create_task(self._exchange(list(answers)))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchange_ended)
        return await asyncio.shield(exchange)

    def _exchange_ended(self, exchange: asyncio.Task[list[ScoreResult]]) -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # whoever was waiting has it, or was cancelled and does not want it

    async def _exchange(self, answers: list[Answer]) -> list[ScoreResult]:
        child = await self._idle.get()
        results: list[ScoreResult] = []
        try:
            while len(results) < len(answers):
                if child is None:
                    child = await _Child.launch(self._spec)
                try:
                    await self._collect(child, answers, results)
                except (TimeoutError, _GoneError) as fault:
                    failed, child = child, None
                    results.append(await self._replace(failed, fault))
            return results
        except BaseException:  # also cancellation at the end: a child with half an exchange behind it is of no use
            if child is not None:
                broken, child = child, None
                await broken.kill()
            raise
        finally:
            self.counters.update(result.kind for result in results)
            self._idle.put_nowait(child)

    async def _collect(self, child: _Child, answers: list[Answer], results: list[ScoreResult]) -> None:
        """Send what is not scored yet and append its results as they come, each by its deadline."""
        async with asyncio.timeout(self._timeout_s):
            await child.send(answers[len(results) :])
        while len(results) < len(answers):
            async with asyncio.timeout(self._timeout_s):
                reply = await child.receive()
            if reply.kind == WRONG_TYPE:
                raise RewardTypeError(reply.text)
            results.append(ScoreResult(reply.reward, reply.kind, reply.text, reply.metrics))

    async def _replace(self, child: _Child, fault: Exception) -> ScoreResult:
        """The result of the sample in hand when its process hung or died; what is left of the process is ended."""
        cause = await child.kill()
        self.counters["replaced"] += 1
        if isinstance(fault, TimeoutError):
            result = ScoreResult(None, TIMEOUT, f"no score within reward.timeout_s={self._timeout_s:g}")
        else:
            result = ScoreResult(None, ERROR, f"the scoring process ended by {cause}")
        log.warning("scoring: %s; the process is replaced", result.error)
        return result

    async def close(self) -> None:
        """End all processes, also in the middle of a score."""
        for exchange in list(self._exchanges):
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        while not self._idle.empty():
            if (child := self._idle.get_nowait()) is not None:
                await child.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def scoring_spec(config: Config) -> ScoringSpec:
    return ScoringSpec(
        task=task_spec(config), function=config.reward.function, max_memory_gb=config.reward.max_memory_gb
    )


def check_scoring(config: Config) -> None:
    """Start one scoring process and end it: whether reward function and task can be built, found out before the run
    starts, in a process of its own, so that the caller imports no user code. Raises ConfigError with one sentence."""

    async def start_and_stop() -> None:
        async with ScoringPool(scoring_spec(config), 1, config.reward.timeout_s):
            pass

    asyncio.run(start_and_stop())
