"""Agents that know nothing of psrl: any callable, or any program, that talks to an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from psrl.agents.base import AgentPrompt, ChatSession, Ending, Endpoint
from psrl.agents.environment_calls import call, one_line
from psrl.agents.rewards import ending_of
from psrl.agents.sandbox import Limits, run_program
from psrl.config.agents import BlackBoxConfig
from psrl.tasks.registry import import_object

PREFIX = "gen_actor_rollout_ref.rollout.agent.black_box"
MAX_RESULT_BYTES = 2**20
USED_UP = ("context_length_exceeded", "turn_limit_exceeded")
"""What the endpoint says when the trajectory has no room for a further turn: an end like any other, not a failure."""
LAST_LINES = 5
"""Of what a failed program printed, in the reason of the failure."""


class BlackBox(Protocol):
    """One way of running it. Raises BlackBoxFailedError, or whatever the user's code raises."""

    async def __call__(self, base_url: str, api_key: str, prompt: dict[str, Any]) -> Any: ...


class BlackBoxFailedError(Exception):
    """It was too slow, ended badly, or left no readable result. Says which."""


def make_black_box(config: BlackBoxConfig, endpoint: Endpoint) -> BlackBoxAgent:
    """Raises ConfigError with one sentence if the function cannot be imported."""
    if config.function is not None:
        box: BlackBox = FunctionBox(import_object(config.function, f"{PREFIX}.function"), config.timeout_s)
    else:
        assert config.command is not None, "checked with the configuration"
        box = CommandBox(shlex.split(config.command), config)
    return BlackBoxAgent(box, endpoint, config.max_concurrent)


class BlackBoxAgent:
    """A SampleAgent around a black box, which has its own deadline; `max_concurrent` of them run at once in this process."""

    def __init__(self, box: BlackBox, endpoint: Endpoint, max_concurrent: int) -> None:
        self._box, self._endpoint = box, endpoint
        self._places = asyncio.Semaphore(max_concurrent)

    async def run(self, session: ChatSession, prompt: AgentPrompt) -> Ending:
        """The deadline begins when the black box does: waiting for a place does not count."""
        async with self._places:
            try:
                value = await self._box(self._endpoint.of(session.id), self._endpoint.api_key, prompt_fields(prompt))
            except BlackBoxFailedError as error:
                return Ending(failed=f"black box: {error}")
            except Exception as error:  # it may raise anything; the trajectory is counted as failed
                if getattr(error, "code", None) in USED_UP:  # an openai client's error that nobody caught
                    return Ending()
                return Ending(failed=f"black box: it raised {one_line(error)}")
        return ending_of(value)


def prompt_fields(prompt: AgentPrompt) -> dict[str, Any]:
    """What a black box is told of its prompt: JSON-like."""
    return {
        "index": prompt.index,
        "messages": prompt.messages,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }


class FunctionBox:
    """A coroutine function, or an ordinary one in a thread (which goes on after a deadline: Python cannot end it)."""

    def __init__(self, function: Callable[..., Any | Awaitable[Any]], timeout_s: float) -> None:
        self._function, self._timeout_s = function, timeout_s

    async def __call__(self, base_url: str, api_key: str, prompt: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await call(self._function, base_url, api_key, prompt)
        except TimeoutError as error:
            if not deadline.expired():  # its own
                raise
            raise BlackBoxFailedError(f"not done within black_box.timeout_s={self._timeout_s:g}") from error


class CommandBox:
    """A program in a directory of its own. It may write its result to PSRL_RESULT_FILE: JSON, a number, null or
    {"score": ..., figures}. Without that file the task's verifier scores. It and all that it started is gone at the end."""

    def __init__(self, argv: list[str], config: BlackBoxConfig) -> None:
        self._argv = argv
        self._limits = Limits(
            timeout_s=config.timeout_s,
            memory_bytes=None if config.max_memory_gb is None else int(config.max_memory_gb * 2**30),
            processes=None,
            file_bytes=None,
            open_files=None,
        )

    async def __call__(self, base_url: str, api_key: str, prompt: dict[str, Any]) -> Any:
        with tempfile.TemporaryDirectory(prefix="psrl-black-box-", ignore_cleanup_errors=True) as name:
            directory = Path(name).resolve()
            told, result = directory / "prompt.json", directory / "result.json"
            await asyncio.to_thread(told.write_text, json.dumps(prompt), encoding="utf-8")
            env = {
                **own_environment(),
                "TMPDIR": name,
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_KEY": api_key,
                "PSRL_PROMPT_FILE": str(told),
                "PSRL_RESULT_FILE": str(result),
            }
            done = await run_program(self._argv, cwd=directory, limits=self._limits, env=env, isolated=False)
            if done.ended:
                said = " | ".join(line.strip() for line in done.output.splitlines()[-LAST_LINES:] if line.strip())
                raise BlackBoxFailedError(done.ended + (f": {said[-500:]}" if said else ""))
            return read_result(result)


def own_environment() -> dict[str, str]:
    """Ours, as the user started it: without the setting that keeps a program from finding the modules beside it."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}


def read_result(path: Path) -> Any:
    """What a program wrote, None if it wrote nothing. Raises BlackBoxFailedError for what is no JSON."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_RESULT_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BlackBoxFailedError(f"its result cannot be read: {one_line(error)}") from error
    if len(text) > MAX_RESULT_BYTES:
        raise BlackBoxFailedError(f"its result is larger than {MAX_RESULT_BYTES} bytes")
    try:
        return json.loads(text)
    except ValueError as error:
        raise BlackBoxFailedError(f"its result is no JSON: {text[:80]!r}") from error
