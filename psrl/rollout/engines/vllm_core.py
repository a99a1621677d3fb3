"""vLLM's engine core in a process of its own, spoken to from a loop that must never block.

The core decodes on and on; what it makes is picked up with `drain`, and `waitables` say when there is something. Commands are
calls with a deadline. If the core dies, both raise `CoreDiedError`; if this process dies, the kernel ends the core.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from psrl.net.waiting import Wakeup
from psrl.supervisor.process import describe_exit, die_with_parent

OWNER = "PSRL_ENGINE_OWNER"
"""Environment variable: pid of the process that the core dies with."""
CLOSE_GRACE_S = 5.0
_LOOK_S = 0.2


class CoreDiedError(RuntimeError):
    """The engine core, or one of its workers, is gone and with it every sample that was being decoded there."""


def _belong_to_owner() -> None:
    """In the core, before its workers are started: die with the owner, and leave a scheduler's signals to the supervisor
    (workers inherit the mask). SIGINT still ends the core in order."""
    die_with_parent(int(os.environ[OWNER]))
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))


class OwnedUniProcExecutor(UniProcExecutor):
    """One worker, in the core's own process."""

    def _init_executor(self) -> None:
        _belong_to_owner()
        super()._init_executor()


class OwnedMultiprocExecutor(MultiprocExecutor):
    """A process a worker; they end when the core does."""

    def _init_executor(self) -> None:
        _belong_to_owner()
        super()._init_executor()


_OWNED: dict[type[Executor], type[Executor]] = {
    UniProcExecutor: OwnedUniProcExecutor,
    MultiprocExecutor: OwnedMultiprocExecutor,
}


class _Client(SyncMPClient):
    """Without the thread that watches the core: it would collect the status that says how the core ended, and close sockets
    that are in use here."""

    def start_engine_core_monitor(self) -> None:
        """`EngineCore` watches."""


class EngineCore:
    """Starts the core and waits until it is ready. ValueError for a way to run workers that would leave orphans."""

    def __init__(self, config: VllmConfig) -> None:
        usual = Executor.get_class(config)
        if usual not in _OWNED:
            raise ValueError(
                f"vLLM would run its workers with {usual.__name__}: use distributed_executor_backend uni or mp"
            )
        os.environ[OWNER] = str(os.getpid())
        self._client = _Client(config, _OWNED[usual], log_stats=True)
        self._process = self._client.resources.engine_manager.processes[0]
        self._sending = threading.Lock()
        self._news = Wakeup()
        self._failure: Exception | None = None
        self._outputs: queue.Queue[EngineCoreOutputs | Exception] = self._client.outputs_queue
        put = self._outputs.put_nowait

        def put_and_tell(item: EngineCoreOutputs | Exception) -> None:
            put(item)
            self._news.set()

        self._outputs.put_nowait = put_and_tell  # type: ignore[method-assign]  # called by the client's receiving thread

    def waitables(self) -> Sequence[int]:
        """Descriptors that are readable when `drain` has something, or has to say that the core is dead."""
        return [*self._news.waitables(), self._process.sentinel]

    def drain(self) -> list[EngineCoreOutputs]:
        """All that has come since the last call, in order. CoreDiedError once the core is gone and this is empty."""
        self._news.clear()
        found: list[EngineCoreOutputs] = []
        with contextlib.suppress(queue.Empty):
            while self._failure is None:
                item = self._outputs.get_nowait()
                if isinstance(item, Exception):
                    self._failure = item
                else:
                    found.append(item)
        if not found:
            self._check_alive()
        return found

    def add(self, request: EngineCoreRequest) -> None:
        self._send(EngineCoreRequestType.ADD, request)

    def abort(self, request_ids: list[str]) -> None:
        """The core forgets these; some tokens of theirs may still come."""
        self._send(EngineCoreRequestType.ABORT, request_ids)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Run `method` of vLLM's EngineCore between two decode steps. From any thread. Everything that the core made before
        it answered is there for `drain`. TimeoutError, CoreDiedError, or RuntimeError with what went wrong there."""
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        number = uuid.uuid1().int >> 64
        self._client.utility_results[number] = answer
        self._send(EngineCoreRequestType.UTILITY, (0, number, method, args))
        deadline = time.monotonic() + timeout_s
        while not answer.done():
            concurrent.futures.wait([answer], timeout=_LOOK_S)
            if not answer.done():
                self._check_alive()
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"vLLM's engine core did not answer {method} within {timeout_s:g} s")
        if (error := answer.exception()) is not None:
            raise RuntimeError(f"vLLM: {error}") from error
        return answer.result()

    def call_workers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Run `method` of the worker extension in every worker, between two decode steps; the results in rank order."""
        return self.call("collective_rpc", method, timeout_s, args, None, timeout_s=timeout_s + 1.0)

    def close(self) -> None:
        """End the core in order within a few seconds, or else by force."""
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGINT)
            self._process.join(CLOSE_GRACE_S)
        self._client.shutdown(timeout=0.0)
        self._news.close()

    def _send(self, kind: EngineCoreRequestType, message: Any) -> None:
        self._check_alive()
        with self._sending:
            self._client._send_input(kind, message)

    def _check_alive(self) -> None:
        if connection.wait([self._process.sentinel], 0):
            self._process.join(1.0)
            code = self._process.exitcode
            cause = "an unknown cause" if code is None else describe_exit(code)
            raise CoreDiedError(f"vLLM's engine core (process {self._process.pid}) ended by {cause}")
        if self._failure is not None or self._client.resources.engine_dead:
            raise CoreDiedError("vLLM's engine core failed; its error stands above in this log") from self._failure
