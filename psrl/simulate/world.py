"""Coordinator, instances, agent loops and trainer on one virtual clock.

The coordinator is the one of a real run, with its router, sync, migration and redundancy, and is driven as the service
does it: what has arrived is handled, one `advance` for all of it, journal, answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from psrl.coordinator.core import Coordinator
from psrl.coordinator.records import AnyRecord
from psrl.protocol import control as c
from psrl.simulate.agents import SimAgents
from psrl.simulate.clock import Clock
from psrl.simulate.costs import Costs
from psrl.simulate.instance import SimInstance
from psrl.simulate.prefix_cache import Blocks, PrefixCache
from psrl.simulate.trainer import SimStep, SimTrainer
from psrl.simulate.workload import Workload
from psrl.telemetry.timeline import Timeline

TRAINER = "trainer-0"
STALLED_S = 3600.0
"""So much virtual time without a word from anybody means that nothing will ever happen again."""
FLUSH_S = 600.0


class Stalled(RuntimeError):  # noqa: N818 - names what happened
    """Nothing can go on although the run is not over: a defect of the coordinator or of the simulation."""


class Journal(Protocol):
    def append(self, records: list[AnyRecord]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a simulation is made of, apart from the coordinator."""

    costs: Costs
    workload: Workload
    num_instances: int
    num_agents: int
    max_num_seqs: int
    kv_capacity: int
    hand_back_waiting: int
    filtering: bool
    steps: int
    save_freq: int
    round_s: float
    tick_s: float
    status_interval_s: float | None
    blocks: Blocks | None = None
    """Engines have a prefix cache of these blocks; None: they have none."""
    names_blocks: bool = False
    """Routing goes by what is cached."""
    timelines: int = 0
    timeline_dir: Path | None = None


class World:
    def __init__(
        self,
        plan: Plan,
        coordinator: Coordinator,
        clock: Clock,
        *,
        journal: Journal | None = None,
        on_step: Callable[[SimStep], None] | None = None,
    ) -> None:
        """`coordinator` starts at time 0; `clock` too."""
        self.plan = plan
        self.core = coordinator
        self.clock = clock
        self.journal = journal
        self.events = self.messages = self.rounds = 0
        self._inbox: list[tuple[str, c.Message]] = []
        self._next_round_s = 0.0
        self._round_is_set = False
        self._heard_s = 0.0
        self._timelines: list[Timeline] = []
        self.agents = SimAgents(
            clock,
            self.tell,
            plan.costs,
            plan.workload,
            plan.filtering,
            plan.blocks if plan.names_blocks else None,
        )
        self.instances = [self._instance(i) for i in range(plan.num_instances)]
        self.agents.instances = {instance.name: instance for instance in self.instances}
        self.trainer = SimTrainer(
            TRAINER,
            clock,
            self.tell,
            plan.costs,
            save_freq=plan.save_freq,
            lengths_of=self.agents.lengths_of,
            timeline=self._timeline(TRAINER, "trainer"),
            on_step=on_step,
        )

    def _instance(self, number: int) -> SimInstance:
        plan, name = self.plan, f"instance-{number}"
        return SimInstance(
            name,
            plan.costs,
            self.clock,
            self.tell,
            self.agents,
            max_num_seqs=plan.max_num_seqs,
            kv_capacity=plan.kv_capacity,
            hand_back_waiting=plan.hand_back_waiting,
            status_interval_s=plan.status_interval_s,
            cache=PrefixCache(plan.blocks) if plan.blocks else None,
            reports_cache=plan.names_blocks,
            timeline=self._timeline(name, "instance") if number < plan.timelines else None,
        )

    def _timeline(self, name: str, role: str) -> Timeline | None:
        if self.plan.timeline_dir is None:
            return None

        def now() -> float:
            return self.clock.now_s

        path = self.plan.timeline_dir / f"{name}.jsonl"
        timeline = Timeline(path, role, 0.0, name=name, flush_interval_s=FLUSH_S, clock=now, wall=now)
        self._timelines.append(timeline)
        return timeline

    def tell(self, sender: str, message: c.Message) -> None:
        """Something for the coordinator, heard in its next round."""
        self._inbox.append((sender, message))

    # ---- the run ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `steps` are trained, in the middle of the work: a run that ends has a last stretch without new groups,
        which would tell nothing of the steps before. Raises Stalled if nothing can go on."""
        self._hello()
        self.clock.at(self.plan.tick_s, self._tick)
        self.trainer.begin()
        self._round()
        while self.core.ended is None and self.trainer.finished < self.plan.steps:
            self.clock.run_next()
            self.events += 1
            if self._inbox or self.agents.has_news:
                self._round_or_wait()
        for timeline in self._timelines:
            timeline.close()

    def _hello(self) -> None:
        """Instances before agent loops: each new instance is announced to every agent loop that is there."""
        for instance in self.instances:
            self._greet("instance", instance.name, instance.state())
        for number in range(self.plan.num_agents):
            self._greet("agent_loop", f"agent-loop-{number}", c.AgentState())
        self._greet("trainer", TRAINER, self.trainer.state())

    def _greet(self, role: str, name: str, state: c.InstanceState | c.AgentState | c.TrainerState) -> None:
        self.tell(name, c.Hello(role=role, name=name, node="", pid=1, sent_s=0.0, state=state))

    def _round_or_wait(self) -> None:
        """A round now, or when the last one is long enough ago."""
        now_s = self.clock.now_s
        if now_s >= self._next_round_s:
            self._round()
        elif not self._round_is_set:
            self._round_is_set = True
            self.clock.at(self._next_round_s, self._round_is_due)

    def _round_is_due(self, _: int) -> None:
        self._round_is_set = False

    def _round(self) -> None:
        now_s, core = self.clock.now_s, self.core
        self.agents.flush()
        inbox, self._inbox = self._inbox, []
        for sender, message in inbox:
            core.handle(sender, message, now_s)
        self.messages += len(inbox)
        self.rounds += 1
        self._heard_s = now_s
        self._next_round_s = now_s + self.plan.round_s
        self._advance()
        if (self._inbox or self.agents.has_news) and not self._round_is_set:
            self._round_is_set = True
            self.clock.at(self._next_round_s, self._round_is_due)

    def _tick(self, _: int) -> None:
        now_s = self.clock.now_s
        self.core.tick(now_s)
        self._advance()
        if now_s - self._heard_s > STALLED_S and len(self.clock) == 0:
            raise Stalled(f"nothing has happened since {self._heard_s:.1f} s: {self.core.staleness.describe()}")
        self.clock.at(now_s + self.plan.tick_s, self._tick)

    def _advance(self) -> None:
        core = self.core
        core.advance(self.clock.now_s)
        records, core.records = core.records, []
        if records and self.journal is not None:
            self.journal.append(records)
        outbox, core.outbox = core.outbox, []
        for name, message in outbox:
            self._deliver(name, message)

    def _deliver(self, name: str, message: c.Message) -> None:
        kind = name[:5]
        if kind == "agent":
            self.agents.hear(name, message)
        elif kind == "insta":
            self.agents.instances[name].hear(message)
        else:
            self.trainer.hear(message)
