"""The trainer on the virtual clock: wait for a buffer, train, publish, checkpoint, again.

A version is published when its training ends, never before, so staleness 0 is a true synchronous run. A buffer comes as
one whole here; with overlap inside a buffer it would come as several `Buffer` messages, each of which is trained for
`train_seconds` of its own tokens while the next one fills, before the one publication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from psrl.protocol import control as c
from psrl.simulate.clock import Clock
from psrl.simulate.costs import Costs
from psrl.telemetry.timeline import CHECKPOINT, PUSH, UPDATE, WAIT, Timeline


@dataclass(slots=True)
class SimStep:
    """One training step: when its parts ended, and what it trained on."""

    begun_s: float
    got_s: float = 0.0
    trained_s: float = 0.0
    pushed_s: float = 0.0
    ended_s: float = 0.0
    tokens: int = 0
    """Prompt and response tokens."""
    prompt_tokens: int = 0
    responses: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    data_epoch: int = 0
    counters: dict[str, int] = field(default_factory=dict)


class SimTrainer:
    """Rank 0, and with it all the others."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        tell: Callable[[str, c.Message], None],
        costs: Costs,
        *,
        save_freq: int,
        lengths_of: Callable[[int], list[int]],
        timeline: Timeline | None = None,
        on_step: Callable[[SimStep], None] | None = None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.tell = tell
        self.costs = costs
        self.save_freq = save_freq
        self.lengths_of = lengths_of
        """Response tokens of a group's samples."""
        self.timeline = timeline
        self.on_step = on_step
        self.version = 0
        self.finished = 0
        """Steps that ended."""
        self.steps: list[SimStep] = []

    def state(self) -> c.TrainerState:
        return c.TrainerState(published=-1, resumed_from=0, start_nonce="simulation")

    def begin(self) -> None:
        """Publish the initial weights, then wait for the first buffer."""
        self._span(PUSH, self.clock.now_s, self.clock.now_s + self.costs.push_s, version=0)
        self.clock.at(self.clock.now_s + self.costs.push_s, self._published)

    def hear(self, message: c.Message) -> None:
        if isinstance(message, c.Buffer):
            self._train(message)

    def _published(self, _: int) -> None:
        self.tell(self.name, c.Published(version=self.version, incarnation=0))
        if self.version:
            self.steps[-1].pushed_s = self.clock.now_s
        if self.version and self.save_freq > 0 and self.version % self.save_freq == 0:
            self._span(CHECKPOINT, self.clock.now_s, self.clock.now_s + self.costs.checkpoint_s)
            self.clock.at(self.clock.now_s + self.costs.checkpoint_s, self._saved)
        else:
            self._next()

    def _saved(self, _: int) -> None:
        self.tell(self.name, c.CheckpointDone(version=self.version, seconds=self.costs.checkpoint_s))
        self._next()

    def _next(self) -> None:
        now_s = self.clock.now_s
        if self.steps:
            step = self.steps[-1]
            step.ended_s = now_s
            self.finished += 1
            if self.on_step:
                self.on_step(step)
        self.steps.append(SimStep(begun_s=now_s))
        self.tell(self.name, c.WantBuffer(buffer=self.version, incarnation=0))

    def _train(self, buffer: c.Buffer) -> None:
        now_s, step = self.clock.now_s, self.steps[-1]
        self._span(WAIT, step.begun_s, now_s)
        step.got_s = now_s
        for group in buffer.groups:
            ref = group.ref
            step.tokens += sum(ref.tokens)
            step.prompt_tokens += ref.prompt_tokens * len(ref.tokens)
            step.responses += self.lengths_of(group.group)
            step.lags.append(buffer.buffer - group.version)
        step.data_epoch = max(group.data_epoch for group in buffer.groups)
        step.counters = buffer.counters
        step.trained_s = now_s + self.costs.train_seconds(step.tokens)
        self._span(UPDATE, now_s, step.trained_s)
        self._span(PUSH, step.trained_s, step.trained_s + self.costs.push_s, version=self.version + 1)
        self.version += 1
        self.clock.at(step.trained_s + self.costs.push_s, self._published)

    def _span(self, name: str, start_s: float, end_s: float, **attributes: int) -> None:
        if self.timeline is not None and end_s > start_s:
            self.timeline.add(name, start_s, end_s, **attributes)
