"""An agent loop whose samples have several turns, instances with a KV capacity and a trainer, around the real coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator_run import Run, done, restarted

from psrl.coordinator.placing import PlacingSettings, PromptFacts
from psrl.coordinator.sessions.session import Key
from psrl.coordinator.sessions.settings import SessionSettings
from psrl.protocol import control as c
from psrl.protocol.generation import FINISH_ABORT, TURN, EngineStats

AGENT = "agent-loop-0"
ENV, DONE = "environment", "done"
PROMPT = 20


@dataclass
class Sample:
    where: str
    """An instance, ENV, DONE, or "" while it looks for a place, for the reason `asked`."""
    tokens: int = PROMPT
    began: int = PROMPT
    """Tokens when its turn began."""
    turns: int = 0
    asked: str = ""
    came_from: str = ""


class Sessions:
    """Every move tells the coordinator and hears what it says; `crowd` may be at an instance though they do not fit, since a
    sample came in the middle of its turn or to an empty instance."""

    def __init__(
        self,
        *,
        capacity: int = 300,
        instances: int = 3,
        sticky: bool = True,
        staleness: int = 3,
        max_concurrent: int = 64,
        **settings,
    ) -> None:
        self.capacity = capacity
        self.names = [f"i{n}" for n in range(instances)]
        self.changes = {
            "buffer_entries": 2,
            "staleness": staleness,
            "steps": 10_000,
            "prompts": 1000,
            "samples_per_group": 2,
            "max_concurrent": max_concurrent,
            "num_instances": instances,
            "placing": PlacingSettings(trajectory_sticky=sticky),
            "sessions": SessionSettings(**{"buffer_per_session": 10, **settings}),
        }
        self.samples: dict[Key, Sample] = {}
        self.alive: dict[str, int] = {}
        """Version of each living instance."""
        self.starts = 0
        self.orders: dict[str, c.Pull] = {}
        self.buffer: c.Buffer | None = None
        self.version = 0
        self.crowd: set[str] = set()
        self.run = Run(**self.changes)
        self._begin()

    def _begin(self) -> None:
        self.run.core.facts = lambda prompt: PromptFacts(PROMPT)
        self.hear(self.run.trainer(wants=self.version, published=self.version))
        for name in self.names:
            self.start(name)
        self.hello()

    # ---- the coordinator says ----------------------------------------------------------------------------------

    def tell(self, sender: str, *messages: c.Message) -> None:
        self.hear(self.run.tell(sender, *messages))

    def hear(self, said) -> None:
        for name, message in said:
            match message:
                case c.Assign():
                    for a in message.groups:
                        self._check_room(a.instance, a.group, PROMPT)
                        self.samples |= {(a.group, i): Sample(a.instance) for i in range(a.n)}
                case c.Routed():
                    for group, sample, instance in message.samples:
                        self._routed((group, sample), instance)
                case c.GroupAbort():
                    self.samples = {k: s for k, s in self.samples.items() if k[0] not in message.groups}
                case c.Pull():
                    self.orders[name] = message
                case c.Buffer():
                    self.buffer = message
                case c.HandBack() | c.GroupTruncate():
                    raise AssertionError(f"in flight, and told {message}")
        self.check()

    def _routed(self, key: Key, instance: str) -> None:
        sample = self.samples[key]
        assert not sample.where, f"{key} is {sample.where} and was routed"
        if sample.asked == TURN:
            self._check_room(instance, key[0], sample.tokens)
        else:
            self.crowd.add(instance)
        sample.where, sample.began = instance, sample.tokens

    def _check_room(self, instance: str, group: int, tokens: int) -> None:
        """What was there when turns began and what comes fit together, unless nobody is there."""
        here = {k: s.began for k, s in self.samples.items() if s.where == instance}
        groups = {k[0] for k in here}
        used = sum(here.values()) - PROMPT * (
            len(here) - len(groups) + (group in groups)
        )  # a group's prompt counts once
        if not here:
            self.crowd.discard(instance)
            self.crowd |= {instance} if tokens > self.capacity else set()
        assert instance in self.crowd or used + tokens <= self.capacity, (instance, used, tokens)

    # ---- moves -------------------------------------------------------------------------------------------------

    def at(self, where: str) -> list[Key]:
        return [key for key, s in self.samples.items() if s.where == where]

    def in_flight(self) -> list[Key]:
        return [key for key, s in self.samples.items() if s.where in self.alive]

    def end_turn(self, key: Key, grown: int) -> None:
        s = self.samples[key]
        s.tokens, s.turns, s.came_from, s.where = s.tokens + grown, s.turns + 1, s.where, ENV
        left = c.SampleMoves(left=[(key[0], s.came_from, 1)])
        self.tell(AGENT, left, c.TurnsEnded(away=[(*key, s.came_from, s.tokens)]))

    def come_back(self, key: Key, added: int) -> None:
        s = self.samples[key]
        s.tokens, s.where, s.asked = s.tokens + added, "", TURN
        self._ask([key], TURN, s.came_from)

    def finish(self, key: Key) -> None:
        s = self.samples[key]
        at, s.where = s.where, DONE
        self.tell(AGENT, c.SampleMoves(left=[(key[0], at, 1)]), c.TurnsEnded(over=[(*key, at)]))
        if all(other.where == DONE for k, other in self.samples.items() if k[0] == key[0]):
            self.samples = {k: other for k, other in self.samples.items() if k[0] != key[0]}
            self.tell(AGENT, done(key[0]))

    def _ask(self, keys: list[Key], reason: str, instance: str) -> None:
        tokens = [self.samples[key].tokens - PROMPT for key in keys]
        self.tell(AGENT, c.RouteRequest(samples=keys, reason=reason, instance=instance, tokens=tokens))

    def hand_back(self, instance: str, reason: str) -> None:
        """Everything in flight there comes back in the middle of its turn."""
        keys = self.at(instance)
        for key in keys:
            self.samples[key].where, self.samples[key].asked = "", reason
            self.tell(AGENT, c.SampleMoves(left=[(key[0], instance, 1)]))
        if keys:
            self._ask(keys, reason, instance if reason else "")

    def report(self, instance: str) -> None:
        here = [self.samples[key].began for key in self.at(instance)]
        stats = EngineStats(running=len(here), kv_tokens=sum(here), kv_capacity_tokens=self.capacity)
        self.tell(instance, c.InstanceStatus(stats=stats))

    def pull(self, instance: str) -> None:
        order = self.orders.pop(instance, None)
        if order is not None and instance in self.alive:
            self.tell(instance, c.PullStarted(version=order.version), c.Switching(version=order.version))
            self.hand_back(instance, FINISH_ABORT)
            self.alive[instance] = order.version
            self.hear(self.run.pulled(instance, order.version))

    def kill(self, instance: str) -> None:
        lost = self.at(instance)
        del self.alive[instance]
        self.orders.pop(instance, None)
        for key in lost:
            self.samples[key].where, self.samples[key].asked = "", ""
        self.run.core.lost(instance, "killed", self.run.now)
        self.hear(self.run.settle())
        for key in [key for key in lost if key in self.samples]:
            self.tell(AGENT, c.SampleMoves(left=[(key[0], instance, 1)]))
            self._ask([key], "", "")

    def start(self, instance: str) -> None:
        self.starts += 1
        self.alive[instance] = -1
        self.hear(self.run.instance(instance, endpoint=f"tcp://{instance}/{self.starts}"))
        self.report(instance)
        self.pull(instance)

    def leave(self, instance: str) -> None:
        self.tell("node", c.Leave(children=[instance], reason="preempted", grace_s=30.0))
        self.hand_back(instance, FINISH_ABORT)
        self.names.remove(instance)
        del self.alive[instance]
        self.run.core.lost(instance, "left", self.run.now)
        self.hear(self.run.settle())

    def hello(self) -> None:
        """The agent loop connects again and tells all that it has."""
        held = []
        for group in sorted({key[0] for key in self.samples}):
            where = [s.where for k, s in self.samples.items() if k[0] == group and s.where in self.alive]
            held.append(c.HeldGroup(group=group, on={name: where.count(name) for name in where}))
        self.crowd |= self.alive.keys()  # who is where is not told
        self.hear(self.run.hello("agent_loop", AGENT, c.AgentState(held=held)))
        for key in self.at(""):
            if key in self.samples and not self.samples[key].where:
                s = self.samples[key]
                self._ask([key], s.asked, s.came_from if s.asked else "")

    def lose_agent(self) -> None:
        self.samples.clear()
        self.run.core.lost(AGENT, "killed", self.run.now)
        self.hear(self.run.settle())
        self.hello()

    def restart_coordinator(self) -> None:
        self.run = restarted(self.run, **self.changes)
        self.buffer, self.orders = None, {}
        versions, self.alive = self.alive, dict.fromkeys(self.alive, -1)
        self.run.core.facts = lambda prompt: PromptFacts(PROMPT)
        self.hear(self.run.trainer(wants=self.version, published=self.version))
        for name, version in versions.items():
            self.alive[name] = version
            self.hear(self.run.instance(name, version=version, endpoint=f"tcp://{name}/again"))
            self.report(name)
            self.pull(name)
        self.hello()

    def train(self) -> None:
        if self.buffer is not None:
            self.buffer, self.version = None, self.version + 1
            incarnation = self.run.core.staleness.incarnation
            published = c.Published(version=self.version, incarnation=incarnation)
            self.tell("trainer-0", published, c.WantBuffer(buffer=self.version, incarnation=incarnation))

    def pass_time(self, seconds: float) -> None:
        self.run.now += seconds
        self.run.core.tick(self.run.now)
        self.hear(self.run.settle())

    # ---- what must hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        gate = self.run.core.gate
        assert gate is not None
        gate.table.check()
        for session in gate.table:
            sample = self.samples.get(session.key)
            if sample is not None and session.waiting is not None:
                assert sample.where == "", (session, sample)

    def calm(self, rounds: int) -> None:
        """From now on everybody goes on. Raises AssertionError if somebody who is here now never ends."""
        here = set(self.samples)
        for name in self.names:
            if name not in self.alive:
                self.start(name)
        for _ in range(rounds):
            if not here & self.samples.keys():
                return
            for name in list(self.alive):
                self.pull(name)
                self.report(name)
            for key in self.at(ENV):
                if key in self.samples:
                    self.come_back(key, 5)
            for key in self.in_flight():
                if key in self.samples and self.samples[key].turns >= 2:
                    self.finish(key)
                elif key in self.samples:
                    self.end_turn(key, 10)
            self.train()
            self.pass_time(2.0)
        never = {key: self.samples[key] for key in sorted(here & self.samples.keys())}
        raise AssertionError(
            f"never end: {never}; {self.run.core.placement.instances}; {list(self.run.core.waiting_routes)}"
        )
