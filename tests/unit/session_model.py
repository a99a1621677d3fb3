"""An agent loop whose samples have several turns, instances with a KV capacity and a trainer, around the real coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coordinator_run import Run, done, restarted

from psrl.coordinator.placing import PlacingSettings, PromptFacts
from psrl.coordinator.sessions.session import AWAY, GENERATING, HUNG, Key
from psrl.coordinator.sessions.settings import SessionSettings
from psrl.protocol import control as c
from psrl.protocol.generation import FINISH_ABORT, FINISH_MIGRATED, FINISH_PREEMPTED, TURN, EngineStats

AGENT = "agent-loop-0"
UNBOUND = FINISH_MIGRATED, FINISH_PREEMPTED
ENV, DONE = "environment", "done"
PROMPT = 20


@dataclass
class Sample:
    where: str
    """An instance, ENV, DONE, or "" while it looks for a place, for the reason `asked`."""
    tokens: int = PROMPT
    began: int = PROMPT
    """Tokens when its turn, or what is left of it, began."""
    turns: int = 0
    asked: str = ""
    came_from: str = ""
    home: str = ""
    """The instance where its KV is, or is to be; "": nowhere."""

    @property
    def between(self) -> bool:
        """Between two turns."""
        return self.where == ENV or (self.where == "" and self.asked == TURN)


class Sessions:
    """Every move tells the coordinator and hears what it says.

    What an instance has promised is counted here anew, from the moves alone; only which of those between two turns keep their KV
    is read off the gate's table, for nobody is told. It is the tokens of those in a turn as that turn began, those of the others
    times a weight, a prompt once, and the buffer. After each move:

    - who is let in between two turns, and a new group, fits with all that is promised there, or nobody else is there;
    - where more is promised than there is room for, nobody keeps KV between two turns.

    So sessions outgrow a cache by what their turns add while they run, until one ends, and by what comes in the middle of a turn,
    which never waits for room. What is promised beyond the cache is promised to turns alone.
    """

    def __init__(
        self,
        *,
        capacity: int = 300,
        instances: int = 3,
        sticky: bool = True,
        staleness: int = 3,
        max_concurrent: int = 64,
        env_token_weight: float = 1.0,
        buffer_per_session: int = 10,
        **settings,
    ) -> None:
        self.capacity = capacity
        self.weight, self.buffer_each = env_token_weight, buffer_per_session
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
            "sessions": SessionSettings(
                env_token_weight=env_token_weight, buffer_per_session=buffer_per_session, **settings
            ),
        }
        self.samples: dict[Key, Sample] = {}
        self.alive: dict[str, int] = {}
        """Version of each living instance."""
        self.starts = 0
        self.orders: dict[str, c.Pull] = {}
        self.buffer: c.Buffer | None = None
        self.version = 0
        self.untold: set[Key] = set()
        """Samples that the coordinator has not heard of since it, or the agent loop, began anew: they do not count yet."""
        self.grown: dict[str, int] = {}
        """Until the next move: what an instance has just reported beyond what was there when turns began."""
        self.crowded: set[str] = set()
        """Until the next move: instances where a sample has just come in the middle of its turn."""
        self.ever_hung: set[Key] = set()
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
        self.crowded.clear()
        for name, message in said:
            match message:
                case c.Assign():
                    for a in message.groups:
                        new = {(a.group, i): Sample(a.instance, home=a.instance) for i in range(a.n)}
                        self.samples |= new
                        self._check_let_in(a.instance, new.keys())
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
        self.grown.clear()

    def _routed(self, key: Key, instance: str) -> None:
        sample = self.samples[key]
        assert not sample.where, f"{key} is {sample.where} and was routed"
        sample.where = sample.home = instance
        if sample.asked == TURN:
            self._check_let_in(instance, {key})
        else:
            self.crowded.add(instance)

    # ---- what is promised --------------------------------------------------------------------------------------

    def counted(self, instance: str) -> Iterator[tuple[Key, float, int]]:
        """(key, weight, tokens) of all whose KV is kept or made there."""
        for key, s in self.samples.items():
            if s.home == instance and s.where != DONE and key not in self.untold:
                if not s.between:
                    yield key, 1.0, s.began
                elif self.keeps(key):
                    yield key, self.weight, s.tokens

    def keeps(self, key: Key) -> bool:
        """Whether a sample between two turns keeps its KV."""
        session = self.run.core.gate.table.get(key)
        return session is not None and session.state == AWAY

    def promised(self, instance: str) -> float:
        """Tokens. Samples of a group have their prompt in common, which counts as much as for the one that counts most."""
        prompts: dict[int, float] = {}
        total = self.grown.get(instance, 0.0)
        for (group, _), weight, tokens in self.counted(instance):
            total += weight * (tokens - PROMPT) + self.buffer_each
            prompts[group] = max(prompts.get(group, 0.0), weight)
        return total + PROMPT * sum(prompts.values())

    def _check_let_in(self, instance: str, who: Iterable[Key]) -> None:
        """Called for each that comes, in order. One that kept its KV here counts again only once it has come, so the last to come is
        held against all."""
        others = {key for key, *_ in self.counted(instance)} - set(who)
        promised = self.promised(instance)
        assert not others or promised <= self.capacity, f"{who} came to {others} at {instance}: {promised} tokens"

    # ---- moves -------------------------------------------------------------------------------------------------

    def at(self, where: str) -> list[Key]:
        return [key for key, s in self.samples.items() if s.where == where]

    def in_flight(self) -> list[Key]:
        return [key for key, s in self.samples.items() if s.where in self.alive]

    def end_turn(self, key: Key, grown: int) -> None:
        s = self.samples[key]
        s.tokens, s.turns, s.came_from, s.home, s.where = s.tokens + grown, s.turns + 1, s.where, s.where, ENV
        self.untold.discard(key)
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
        """One that is interrupted goes on counting where it was, unless it has to leave."""
        for key in keys:
            s = self.samples[key]
            s.began = s.tokens
            if reason != TURN or key in self.untold:
                s.home = instance if instance in self.alive and reason not in UNBOUND else ""
            self.untold.discard(key)
        tokens = [self.samples[key].tokens - PROMPT for key in keys]
        self.tell(AGENT, c.RouteRequest(samples=keys, reason=reason, instance=instance, tokens=tokens))

    def hand_back(self, instance: str, reason: str) -> None:
        """Everything in flight there comes back in the middle of its turn."""
        keys = self.at(instance)
        for key in keys:
            s = self.samples[key]
            s.where, s.asked, s.came_from = "", reason, instance
            self.tell(AGENT, c.SampleMoves(left=[(key[0], instance, 1)]))
        if keys:
            self._ask(keys, reason, instance if reason else "")

    def report(self, instance: str, grown: int = 0) -> None:
        """Each turn there has made `grown` more tokens. A prompt is held once for all of its group."""
        here = self.at(instance)
        for key in here:
            self.samples[key].tokens += grown
        held = sum(self.samples[key].tokens for key in here) - self._shared(here)
        turns = {key: tokens for key, _, tokens in self.counted(instance) if not self.samples[key].between}
        if not self.untold.intersection(here):
            self.grown[instance] = max(0, held - (sum(turns.values()) - self._shared(turns)))
        stats = EngineStats(running=len(here), kv_tokens=held, kv_capacity_tokens=self.capacity)
        self.tell(instance, c.InstanceStatus(stats=stats))

    def _shared(self, keys: Iterable[Key]) -> int:
        keys = list(keys)
        return PROMPT * (len(keys) - len({group for group, _ in keys}))

    def pull(self, instance: str) -> None:
        order = self.orders.pop(instance, None)
        if order is not None and instance in self.alive:
            self.tell(instance, c.PullStarted(version=order.version), c.Switching(version=order.version))
            self.hand_back(instance, FINISH_ABORT)
            self.alive[instance] = order.version
            self.hear(self.run.pulled(instance, order.version))

    def _gone(self, instance: str) -> None:
        del self.alive[instance]
        for s in self.samples.values():
            s.home = "" if s.home == instance else s.home

    def kill(self, instance: str) -> None:
        lost = self.at(instance)
        self._gone(instance)
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
        self._gone(instance)
        self.run.core.lost(instance, "left", self.run.now)
        self.hear(self.run.settle())

    def hello(self) -> None:
        """The agent loop connects again and tells all that it has."""
        held = []
        for group in sorted({key[0] for key in self.samples}):
            where = [s.where for k, s in self.samples.items() if k[0] == group and s.where in self.alive]
            held.append(c.HeldGroup(group=group, on={name: where.count(name) for name in where}))
        self.untold = set(self.samples)
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
        self.run, self.untold = restarted(self.run, **self.changes), set(self.samples)
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
            if sample is not None:
                assert sample.between == (session.state != GENERATING), (session, sample)
                assert session.waiting is None or sample.where == "", (session, sample)
                assert session.state != AWAY or session.instance == sample.home, (session, sample)
        self.ever_hung |= {session.key for session in gate.table if session.state == HUNG}
        for instance in self.alive.keys() - self.crowded:
            if (promised := self.promised(instance)) > self.capacity:
                kept = [key for key, *_ in self.counted(instance) if self.samples[key].between]
                assert not kept, f"{instance} has promised {promised} tokens and keeps those of {kept}"

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
