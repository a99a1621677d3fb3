"""A scoring process: the verifier or the user's reward function, away from everything that must survive it.

    python -m psrl.rollout.score_worker PARENT_PID

speaks frames (u32 length, msgpack) over the pipes that were its stdin and stdout: a ScoringSpec in, one Reply "ready"
out; then a list of answers in, one Reply for each out, in order and as soon as it is known. User code keeps a stdout of
its own: what it prints goes to stderr.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from psrl.config.errors import ConfigError
from psrl.supervisor.shim import set_parent_death_signal
from psrl.tasks.base import Answer
from psrl.tasks.registry import TaskSpec, build_task, import_object

READY, FATAL = "ready", "fatal"
OK, ERROR, INVALID, WRONG_TYPE = "ok", "error", "invalid", "wrong_type"
FRAME = struct.Struct("<I")
OOM_SCORE_ADJ = 800
"""The kernel ends this process long before a trainer when memory runs out."""
TRACEBACKS = 3
"""Tracebacks written to the log; the rest is told to the caller in one line each."""
MAX_TEXT = 500

Scorer = Callable[[Answer], Any]


class ScoringSpec(msgspec.Struct, frozen=True, kw_only=True):
    task: TaskSpec
    function: str | None = None
    """`module:function`; None: the task's own verifier."""
    max_memory_gb: float = 4.0


class Reply(msgspec.Struct, array_like=True):
    kind: str
    reward: float | None = None
    text: str | None = None
    metrics: dict[str, float] = {}


def build_scorer(spec: ScoringSpec) -> Scorer:
    """Raises ConfigError with one sentence if there is no such function or task."""
    if spec.function is None:
        return build_task(spec.task).score
    function = import_object(spec.function, "reward.function")

    def call(answer: Answer) -> Any:
        return function(
            data_source=answer.data_source,
            solution_str=answer.solution_str,
            ground_truth=answer.ground_truth,
            extra_info=answer.extra_info,
        )

    return call


def judge(value: Any, name: str) -> Reply:
    """What a returned value means. A number is a reward, a mapping with "score" a reward with further figures (kept as
    metrics); None, NaN and infinity are invalid; anything else is a mistake in the function, which is named."""
    metrics: dict[str, float] = {}
    if isinstance(value, dict) and "score" in value:
        figures = {k: v for k, v in value.items() if k != "score" and isinstance(v, Real) and math.isfinite(v)}
        metrics = {str(k): float(v) for k, v in figures.items()}
        value = value["score"]
    if value is None:
        return Reply(INVALID, text=f"{name} returned None")
    if not isinstance(value, Real):
        shown = f"{value!r:.80} of type {type(value).__name__}"
        return Reply(WRONG_TYPE, text=f"{name} returned {shown}: a reward must be a number (or None).")
    reward = float(value)
    if not math.isfinite(reward):
        return Reply(INVALID, text=f"{name} returned {reward}")
    return Reply(OK, reward, metrics=metrics)


class Worker:
    """Scores what comes in until the other side closes the channel."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO):
        self._incoming, self._outgoing = incoming, outgoing
        self._encoder = msgspec.msgpack.Encoder()
        self._tracebacks = 0

    def run(self) -> int:
        frame = self._receive()
        if frame is None:
            return 0
        spec = msgspec.msgpack.decode(frame, type=ScoringSpec)
        name = f"reward.function={spec.function}" if spec.function else f"the verifier of {spec.task.name}"
        try:
            _limit("RLIMIT_AS", int(spec.max_memory_gb * 2**30))
            scorer = build_scorer(spec)
        except ConfigError as error:
            self._send(Reply(FATAL, text=str(error)))
            return 1
        except (Exception, SystemExit) as error:  # building a task runs code of its package or of the user
            traceback.print_exc()
            self._send(Reply(FATAL, text=f"{name} cannot be set up: {_one_line(error)}"))
            return 1
        self._send(Reply(READY))
        decoder = msgspec.msgpack.Decoder(list[Answer])
        while (frame := self._receive()) is not None:
            for answer in decoder.decode(frame):
                self._send(self._score(scorer, answer, name))
        return 0

    def _score(self, scorer: Scorer, answer: Answer, name: str) -> Reply:
        try:
            return judge(scorer(answer), name)
        except (Exception, SystemExit) as error:  # a reward function may raise anything; the caller counts it
            if self._tracebacks < TRACEBACKS:
                self._tracebacks += 1
                traceback.print_exc()
            return Reply(ERROR, text=f"{name} raised {_one_line(error)}")

    def _receive(self) -> bytes | None:
        header = self._incoming.read(FRAME.size)
        if len(header) < FRAME.size:
            return None
        (length,) = FRAME.unpack(header)
        body = self._incoming.read(length)
        return body if len(body) == length else None

    def _send(self, reply: Reply) -> None:
        body = self._encoder.encode(reply)
        self._outgoing.write(FRAME.pack(len(body)) + body)
        self._outgoing.flush()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_TEXT]}"


def _take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the channel off descriptors 0 and 1 (not inherited by what user code starts); stdin is empty from now on
    and stdout is stderr."""
    incoming, outgoing = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb")


def _limit(name: str, value: int) -> None:
    """Lower a limit, never beyond what a stricter environment allows."""
    number = getattr(resource, name)
    _, hard = resource.getrlimit(number)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (value, value))


def main(argv: list[str]) -> int:
    incoming, outgoing = _take_channel()
    if not set_parent_death_signal(signal.SIGKILL, int(argv[0])):
        return 1
    for number in (signal.SIGINT, signal.SIGUSR2):  # the parent decides what Ctrl-C and a warning from Slurm mean
        signal.signal(number, signal.SIG_IGN)
    _limit("RLIMIT_CORE", 0)
    Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))
    try:
        return Worker(incoming, outgoing).run()
    except BrokenPipeError:  # the pool is gone
        return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
