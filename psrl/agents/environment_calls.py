"""Calls into code that may hang, raise or be out of order for a moment: deadlines, retries, threads."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from psrl.agents.base import AgentPrompt, Message
from psrl.agents.environment import Environment, EnvironmentRetryError, Step

log = logging.getLogger("psrl.agents")
T = TypeVar("T")
PAUSE_S = 0.2
"""Before the first retry; doubles with each."""
MAX_TEXT = 300


class EnvironmentFailedError(Exception):
    """The environment cannot go on with this trajectory. Says why in one line."""


def one_line(error: BaseException) -> str:
    """`one_line(ValueError("no\\n such"))  == "ValueError: no such"`."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_TEXT]}".rstrip(": ")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call an ordinary function in a thread of its own. Cancelling this stops the waiting, not the thread: Python cannot.

    Not a pool: threads that hang would fill it, and keep the process from ending."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if outcome.done():  # nobody waits any more
            return
        if error is None:
            outcome.set_result(result)  # type: ignore[arg-type]
        elif isinstance(error, StopIteration):  # which a future does not take
            outcome.set_exception(RuntimeError("StopIteration"))
        else:
            outcome.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as raised:  # handed over, whatever it is
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed: this thread hung beyond the end
            pass

    threading.Thread(target=work, name="psrl-call", daemon=True).start()
    return await outcome


async def call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The result of a coroutine function, or of an ordinary one in a thread."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(*args, **named)
    result = await in_thread(functools.partial(function, *args, **named))
    return await result if inspect.isawaitable(result) else result


class EnvironmentCalls:
    """An Environment by deadline and with retries; every fault becomes an EnvironmentFailedError. `retried` counts the calls
    that were made again."""

    def __init__(self, environment: Environment, *, timeout_s: float, retries: int) -> None:
        self._environment, self._timeout_s, self._retries = environment, timeout_s, retries
        self.retried = 0

    async def reset(self, prompt: AgentPrompt) -> tuple[list[Message], list[dict[str, Any]]]:
        """First messages, and tools."""
        messages = await self._by_deadline("reset", prompt)
        if not (isinstance(messages, Sequence) and messages and all(isinstance(m, dict) for m in messages)):
            raise EnvironmentFailedError(f"reset returned {messages!r:.80}, not a list of messages")
        return list(messages), list(self._environment.tools)

    async def step(self, message: Message) -> Step:
        step = await self._by_deadline("step", message)
        if not isinstance(step, Step):
            raise EnvironmentFailedError(f"step returned {step!r:.80}, not a Step")
        return step

    async def score(self) -> float | None:
        return await self._by_deadline("score")

    async def close(self) -> None:
        """Never raises: a trajectory that is over stays what it was."""
        try:
            await self._by_deadline("close")
        except EnvironmentFailedError as error:
            log.warning("an environment was not closed in order: %s", error)

    async def _by_deadline(self, name: str, *args: Any) -> Any:
        function = getattr(self._environment, name)
        for attempt in range(self._retries + 1):
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    return await call(function, *args)
            except EnvironmentRetryError as error:
                if attempt == self._retries:
                    raise EnvironmentFailedError(
                        f"{name} was tried {attempt + 1} times (multi_turn.max_env_retries={self._retries}): {error}"
                    ) from error
                self.retried += 1
                await asyncio.sleep(PAUSE_S * 2**attempt)
            except TimeoutError as error:
                if not deadline.expired():  # the environment's own
                    raise EnvironmentFailedError(f"{name} raised {one_line(error)}") from error
                raise EnvironmentFailedError(
                    f"no answer to {name} within multi_turn.step_timeout_s={self._timeout_s:g}"
                ) from error
            except Exception as error:  # an environment may raise anything; the trajectory is counted as failed
                raise EnvironmentFailedError(f"{name} raised {one_line(error)}") from error
        raise AssertionError("the last attempt returns or raises")
