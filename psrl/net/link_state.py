"""When to look for a coordinator, when to believe in one, when to give up: decisions only, time is passed in."""

from __future__ import annotations

import enum

from psrl.config.schema import FaultToleranceConfig
from psrl.protocol.control import Welcome

LOOK_INTERVAL_S = 1.0
"""Least time between two looks into the run directory, and none at all while the coordinator answers."""

_NO_ENDPOINT = "no endpoint of the coordinator is published"


class CoordinatorGoneError(RuntimeError):
    """No coordinator for longer than allowed: this role leaves by itself."""


class Phase(enum.Enum):
    SEEKING = "seeking"  # no connection: look for an endpoint
    GREETING = "greeting"  # connecting, or hello said and no welcome yet
    WELCOMED = "welcomed"


class LinkState:
    """A role's view of the coordinator. The owner calls `tick` often, and the other methods when their event happens.

    SEEKING --found--> GREETING --welcomed--> WELCOMED; a lost connection or silence leads back to SEEKING. A newer
    endpoint generation is preferred at any time, an older generation or an older epoch is never believed.
    """

    def __init__(self, limits: FaultToleranceConfig, now: float) -> None:
        self.phase = Phase.SEEKING
        self.generation = -1
        self.epoch = 0
        self.clock_offset_s = 0.0
        """Add to this process's monotonic clock to get the coordinator's."""
        self.clock_error_s = 0.0
        """Half the round trip in which the offset was measured: the offset is no further off than this."""
        self.hello_said = False
        self.cause = _NO_ENDPOINT
        self._limits = limits
        self._without_since = now
        self._next_look = now
        self._greeting_since = now

    def tick(self, now: float, silent_s: float = 0.0, broken: str | None = None, trouble: str | None = None) -> bool:
        """True if the run directory should be looked at now (then call `found` if something is there).

        `silent_s`: how long the server has left a heartbeat unanswered; `broken`: why the connection is lost;
        `trouble`: why none comes about. Raises CoordinatorGoneError once there was no coordinator for
        `hello_timeout_s` at first, `fence_s` later.
        """
        if self.phase is Phase.WELCOMED:
            if broken is not None:
                self._lose(now, broken)
            elif silent_s > self._limits.heartbeat_timeout_s:
                self._lose(now - silent_s, f"it was silent for {silent_s:.1f} s")
            elif silent_s <= 2 * self._limits.heartbeat_interval_s:
                return False
        elif self.phase is Phase.GREETING:
            self.cause = trouble or self.cause
            if broken is not None or now - self._greeting_since > self._limits.heartbeat_timeout_s:
                self.cause = broken or self.cause
                self.phase = Phase.SEEKING
        if self.phase is not Phase.WELCOMED and now - self._without_since > self._patience_s():
            raise CoordinatorGoneError(
                f"no coordinator for {now - self._without_since:.0f} s (allowed: {self._patience_name()}="
                f"{self._patience_s():g}): {self.cause}"
            )
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_INTERVAL_S
        return True

    def found(self, now: float, generation: int) -> bool:
        """True if the owner should connect to this endpoint generation now."""
        if generation < self.generation or (generation == self.generation and self.phase is not Phase.SEEKING):
            return False
        if self.phase is Phase.WELCOMED:
            self._lose(now, "a newer coordinator has published its endpoint")
        self.generation, self.phase = generation, Phase.GREETING
        self._greeting_since, self.hello_said = now, False
        if self.cause == _NO_ENDPOINT:
            self.cause = "its endpoint is published, but it said no welcome"
        return True

    def said_hello(self) -> None:
        self.hello_said = True

    def welcomed(self, now: float, welcome: Welcome) -> bool:
        """Take a Welcome: True if from now on its epoch counts, False if it comes from a coordinator of the past."""
        if self.phase is not Phase.GREETING or not self.hello_said:
            return False
        if welcome.epoch < self.epoch:
            self.phase = Phase.SEEKING
            self.cause = f"a coordinator of the past (epoch {welcome.epoch}, known: {self.epoch}) said welcome"
            return False
        self.phase, self.epoch = Phase.WELCOMED, welcome.epoch
        self.clock_offset_s = welcome.now_s - (welcome.hello_sent_s + now) / 2
        self.clock_error_s = (now - welcome.hello_sent_s) / 2
        return True

    def due_in_s(self, now: float) -> float:
        """Seconds until `tick` has something to decide again."""
        if self.phase is Phase.WELCOMED:
            return self._limits.heartbeat_interval_s
        return max(0.0, self._next_look - now)

    def _lose(self, since: float, cause: str) -> None:
        self.phase, self.cause = Phase.SEEKING, cause
        self._without_since = since
        self._next_look = min(self._next_look, since)

    def _patience_s(self) -> float:
        return self._limits.fence_s if self.epoch else self._limits.hello_timeout_s

    def _patience_name(self) -> str:
        return "psrl.fault_tolerance." + ("fence_s" if self.epoch else "hello_timeout_s")
