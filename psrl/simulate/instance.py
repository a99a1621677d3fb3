"""A rollout instance on the virtual clock: an engine model, and what the instance process does around its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from psrl.protocol import control as c
from psrl.protocol.generation import FINISH_ABORT, FINISH_MIGRATED, FINISH_PREEMPTED, FINISH_REFUSED, EngineStats
from psrl.rollout.preemption import PreemptionWatch
from psrl.simulate.clock import Clock
from psrl.simulate.costs import Costs
from psrl.simulate.engine import SimEngine
from psrl.simulate.prefix_cache import PrefixCache
from psrl.simulate.samples import SimGroup, SimSample
from psrl.telemetry.timeline import BUSY, PULL, SWITCH, WORK, Timeline


class Hears(Protocol):
    """The agent loops, as an instance sees them."""

    def turn_ended(self, sample: SimSample, instance: str) -> None: ...

    def handed_back(self, samples: Iterable[SimSample], instance: str, finish: str) -> None: ...


class SimInstance:
    """Prefetches while decoding goes on, then hands partial samples back (or finishes them), switches, says so."""

    __slots__ = (
        "_order",
        "_report_is_set",
        "_reported",
        "_scheduled_s",
        "_staged",
        "_status_s",
        "_worked",
        "agents",
        "clock",
        "costs",
        "engine",
        "incarnation",
        "max_concurrent",
        "name",
        "preemption",
        "reports_cache",
        "status_interval_s",
        "switches",
        "tell",
        "timeline",
    )

    def __init__(
        self,
        name: str,
        costs: Costs,
        clock: Clock,
        tell: Callable[[str, c.Message], None],
        agents: Hears,
        *,
        max_num_seqs: int,
        kv_capacity: int,
        hand_back_waiting: int,
        status_interval_s: float | None,
        cache: PrefixCache | None = None,
        reports_cache: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        self.name = name
        self.costs = costs
        self.clock = clock
        self.tell = tell
        self.agents = agents
        self.engine = SimEngine(costs, max_num_seqs=max_num_seqs, kv_capacity=kv_capacity, cache=cache)
        self.reports_cache = reports_cache and cache is not None
        self.max_concurrent = max_num_seqs
        self.preemption = PreemptionWatch(hand_back_waiting)
        self.status_interval_s = status_interval_s
        """None: no status is reported."""
        self.timeline = timeline
        self.incarnation = 0
        self.switches = 0
        self._order: c.Pull | None = None
        self._staged = -1
        self._scheduled_s = -1.0
        self._status_s = 0.0
        self._reported = (0, 0, 0)
        self._report_is_set = False
        self._worked = EngineStats()
        if timeline is not None:
            self.engine.spans = []

    def state(self) -> c.InstanceState:
        return c.InstanceState(
            endpoint=f"sim://{self.name}", version=-1, incarnation=0, max_concurrent=self.max_concurrent
        )

    # ---- requests --------------------------------------------------------------------------------------------

    def request(self, group: SimGroup, samples: Iterable[SimSample]) -> None:
        """Make these samples, or go on with them; refused if the weights here are older than the group's."""
        now_s, engine = self.clock.now_s, self.engine
        if group.version > engine.version:
            self.agents.handed_back(list(samples), self.name, FINISH_REFUSED)
            return
        for sample in samples:
            engine.submit(sample, now_s)
        self._follow()

    def abort(self, samples: Iterable[SimSample]) -> None:
        """Stop work on these; nothing is said of them any more."""
        self.engine.abort([s for s in samples if s.order], self.clock.now_s)
        self._follow()
        self._switch_if_staged()

    def _wake(self, set_for_s: float) -> None:
        if set_for_s != self._scheduled_s:
            return  # the engine's plan has changed since, and another alarm is set
        now_s, engine = self.clock.now_s, self.engine
        self._scheduled_s = -1.0
        if engine.next_s is None or engine.next_s > now_s:
            self._follow()
            return
        self._ended(engine.wake(now_s))
        if engine.preemptions and self.preemption.hands_back(engine.stats()):
            self.agents.handed_back(engine.take_waiting(), self.name, FINISH_PREEMPTED)
        self._follow()
        self._switch_if_staged()

    def _follow(self) -> None:
        """Set the alarm for the engine's next event, and report what has changed."""
        next_s = self.engine.next_s
        if next_s is not None and next_s != self._scheduled_s:
            self._scheduled_s = next_s
            self.clock.at(next_s, self._wake, next_s)
        if self.status_interval_s is not None:
            self._report()
        if self.timeline is not None:
            self._draw()

    # ---- weights ---------------------------------------------------------------------------------------------

    def hear(self, message: c.Message) -> None:
        match message:
            case c.Pull():
                self._pull(message)
            case c.HandBack():
                self.clock.at(self.engine.boundary(self.clock.now_s), self._migrate)

    def _pull(self, order: c.Pull) -> None:
        pulling = self._order is not None
        self._order = order
        if not pulling and self._staged < 0:
            self.tell(self.name, c.PullStarted(version=order.version))
            self.clock.at(self.clock.now_s + self.costs.pull_s, self._arrived, order.version)

    def _arrived(self, version: int) -> None:
        self._staged = version
        if self.timeline is not None:
            now_s = self.clock.now_s
            self.timeline.add(PULL, now_s - self.costs.pull_s, now_s, version=version)
        self._switch_if_staged()

    def _switch_if_staged(self) -> None:
        """Decoding stops at the end of the step in hand: at once with partial rollout, else when nothing is left."""
        engine = self.engine
        if self._staged < 0 or self._order is None or engine.paused:
            return
        if self._order.abort_running or not engine.has_work:
            boundary = engine.boundary(self.clock.now_s)
            engine.paused = True
            if boundary > self.clock.now_s:
                self.clock.at(boundary, self._begin_switch)
            else:
                self._begin_switch(0)

    def _begin_switch(self, _: int) -> None:
        self.tell(self.name, c.Switching(version=self._staged))
        now_s = self.clock.now_s
        gone = self._clear()
        if self.timeline is not None:
            self._draw()
            self.timeline.add(SWITCH, now_s, now_s + self.costs.switch_s, version=self._staged, **self._work())
        self.clock.at(now_s + self.costs.switch_s, self._end_switch, gone)

    def _clear(self) -> list[SimSample]:
        """At the end of a step: whose turn ends with it has ended, the rest is taken away."""
        engine, now_s = self.engine, self.clock.now_s
        if engine.next_s is not None and engine.next_s <= now_s:
            self._ended(engine.wake(now_s))
        return engine.abort_all(now_s)

    def _ended(self, samples: Iterable[SimSample]) -> None:
        for sample in samples:
            self.agents.turn_ended(sample, self.name)

    def _end_switch(self, gone: list[SimSample]) -> None:
        order, engine, version = self._order, self.engine, self._staged
        assert order is not None  # a switch begins with one
        engine.new_weights(version, self.clock.now_s)
        self.incarnation = order.incarnation
        self._order, self._staged = None, -1
        self.switches += 1
        self.tell(
            self.name,
            c.PullDone(
                version=version,
                incarnation=self.incarnation,
                pull_s=self.costs.pull_s,
                pause_s=self.costs.switch_s,
                nbytes=0,
            ),
        )
        if gone:
            self.agents.handed_back(gone, self.name, FINISH_ABORT)
        engine.look(self.clock.now_s)
        self._follow()

    def _migrate(self, _: int) -> None:
        if not self.engine.paused:  # a switch hands everything back by itself
            self.agents.handed_back(self._clear(), self.name, FINISH_MIGRATED)
            self._follow()

    # ---- what others see -------------------------------------------------------------------------------------

    def _report(self) -> None:
        engine, now_s = self.engine, self.clock.now_s
        gauges = (len(engine.running), len(engine.waiting), engine.preemptions)
        cache = engine.cache if self.reports_cache else None
        if gauges == self._reported and not (cache and cache.has_news):
            return
        if now_s < self._status_s:
            if not self._report_is_set:
                self._report_is_set = True
                self.clock.at(self._status_s, self._report_later)
            return
        self._reported = gauges
        self._status_s = now_s + (self.status_interval_s or 0.0)
        events = cache.take_news() if cache and cache.has_news else None
        self.tell(self.name, c.InstanceStatus(stats=engine.stats(), at_s=now_s, cache=events))

    def _report_later(self, _: int) -> None:
        self._report_is_set = False
        self._report()

    def _work(self) -> dict[str, float]:
        """What the engine has done since the last switch, as a real instance notes it."""
        before, self._worked = self._worked, self.engine.stats()
        return {name: round(getattr(self._worked, name) - getattr(before, name), 6) for name in WORK}

    def _draw(self) -> None:
        assert self.timeline is not None and self.engine.spans is not None
        for start_s, _, busy_s in self.engine.spans:
            if busy_s > 0:
                self.timeline.add(BUSY, start_s, start_s + busy_s)
        self.engine.spans.clear()
