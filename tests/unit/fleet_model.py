"""Agent loops, instances and a trainer as pure models around the real coordinator; somebody else chooses what happens next.

Messages of one sender to one receiver keep their order, those of different pairs do not. An instance makes one token a
step for each sample that it has. Every move checks what must never break: a sample is at one place at most, and none of its
tokens is made twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator_run import Run, done

from psrl.audit import audit
from psrl.protocol import control as c
from psrl.protocol.generation import FINISH_ABORT, FINISH_MIGRATED, FINISH_REFUSED, FINISH_STOP, EngineStats

CORE, TRAINER = "coordinator", "trainer-0"
Key = tuple[int, int]
"""(group, sample)"""


@dataclass
class Work:
    """One sample on its way to an instance, or there."""

    key: Key
    min_version: int
    incarnation: int
    made: int
    length: int


@dataclass
class Chunk:
    """`made`: tokens that exist by now. `finish` "" while it goes on."""

    key: Key
    made: int
    finish: str


@dataclass
class Sample:
    length: int
    made: int = 0
    at: str = ""
    """The endpoint where it is."""
    finished: int = 0


@dataclass
class Instance:
    name: str
    starts: int = 1
    alive: bool = True
    version: int = -1
    incarnation: int = -1
    order: c.Pull | None = None
    samples: dict[Key, Work] = field(default_factory=dict)
    steps: int = 0
    tokens: int = 0

    @property
    def endpoint(self) -> str:
        return f"{self.name}#{self.starts}"


class Fleet:
    """`length` gives the tokens of (group, sample). `do` lists what can happen now; `calm` lets everything happen, fairly,
    until the run is over."""

    def __init__(self, length: Callable[[int, int], int], *, instances: int, agents: int = 1, **changes) -> None:
        self.length = length
        self.run = Run(**changes)
        self.agents: dict[str, dict[int, tuple[c.Assignment, dict[int, Sample]]]] = {
            f"agent-loop-{i}": {} for i in range(agents)
        }
        self.reachable: dict[str, dict[str, str]] = {agent: {} for agent in self.agents}
        self.instances = {f"instance-{i}": Instance(f"instance-{i}") for i in range(instances)}
        self.channels: dict[tuple[str, str], deque] = {}
        self.buffer: c.Buffer | None = None
        self.version = 0
        self.hears(self.run.trainer(wants=0))
        for name in self.instances:
            self.hears(self.run.instance(name, endpoint=self.instances[name].endpoint))
        for agent in self.agents:
            self.hears(self.run.hello("agent_loop", agent, c.AgentState()))

    @property
    def over(self) -> bool:
        return self.run.core.ended is not None

    # ---- messages ----------------------------------------------------------------------------------------------

    def hears(self, said: list[tuple[str, c.Message]]) -> None:
        """What the coordinator said is on its way."""
        for name, message in said:
            self.channels.setdefault((CORE, name), deque()).append(message)

    def post(self, sender: str, receiver: str, message: object) -> None:
        self.channels.setdefault((sender, receiver), deque()).append(message)

    def deliver(self, channel: tuple[str, str]) -> None:
        sender, receiver = channel
        message = self.channels[channel].popleft()
        if receiver == CORE:
            self.hears(self.run.tell(sender, message))
        elif receiver in self.agents:
            self._agent_hears(receiver, sender, message)
        elif receiver in self.instances:
            self._instance_hears(self.instances[receiver], sender, message)
        elif isinstance(message, c.Buffer):
            self.buffer = message
        self.check()

    # ---- agent loops -------------------------------------------------------------------------------------------

    def _agent_hears(self, agent: str, sender: str, message: object) -> None:
        held = self.agents[agent]
        match message:
            case c.Assign():
                for a in message.groups:
                    held[a.group] = (a, {i: Sample(self.length(a.group, i)) for i in range(a.n)})
                    self._send(agent, a.instance, [(a.group, i) for i in range(a.n)], a.incarnation)
            case c.Routed():
                for group, sample, instance in message.samples:
                    if group in held:
                        self._send(agent, instance, [(group, sample)], message.incarnation)
            case c.GroupAbort():
                for group in message.groups:
                    _, samples = held.pop(group, (None, {}))
                    for instance in self.instances.values():
                        for sample in samples:
                            instance.samples.pop((group, sample), None)
                    self._forget_on_the_way(group)
            case c.GroupAck():
                for group in message.groups:
                    held.pop(group, None)
            case c.Instances():
                self._know(agent, message)
            case Chunk():
                self._chunk(agent, sender, message)

    def _send(self, agent: str, instance: str, keys: list[Key], incarnation: int) -> None:
        endpoint = self.reachable[agent].get(instance)
        for group, sample in keys:
            assignment, samples = self.agents[agent][group]
            state = samples[sample]
            assert not state.at and not state.finished, f"{group, sample} was routed twice"
            if endpoint is None:
                self.post(agent, CORE, c.SampleMoves(left=[(group, instance, 1)]))
                self._ask(agent, [(group, sample)])
                continue
            state.at = endpoint
            work = Work((group, sample), assignment.version, incarnation, state.made, state.length)
            target = self.instances[instance]
            if target.alive and target.endpoint == endpoint:
                self.post(agent, instance, work)

    def _ask(self, agent: str, keys: list[Key], reason: str = "", instance: str = "") -> None:
        tokens = [self.agents[agent][group][1][sample].made for group, sample in keys]
        self.post(agent, CORE, c.RouteRequest(samples=keys, reason=reason, instance=instance, tokens=tokens))

    def _chunk(self, agent: str, instance: str, chunk: Chunk) -> None:
        group, sample = chunk.key
        if group not in self.agents[agent]:
            return
        _, samples = self.agents[agent][group]
        state = samples[sample]
        assert chunk.made >= state.made, "a token was lost"
        state.made = chunk.made
        if not chunk.finish:
            return
        state.at = ""
        self.post(agent, CORE, c.SampleMoves(left=[(group, instance, 1)]))
        if chunk.finish != FINISH_STOP:
            self._ask(agent, [chunk.key], chunk.finish, instance)
            return
        state.finished += 1
        assert state.finished == 1 and state.made == state.length, "made twice, or scored before its end"
        if all(s.finished for s in samples.values()):
            self.post(agent, CORE, done(group))

    def _know(self, agent: str, message: c.Instances) -> None:
        known = self.reachable[agent]
        for info in message.instances:
            if (endpoint := known.get(info.name)) and (not info.alive or endpoint != info.endpoint):
                del known[info.name]
                lost = [
                    (group, i)
                    for group, (_, samples) in self.agents[agent].items()
                    for i, s in samples.items()
                    if s.at == endpoint
                ]
                for group, sample in lost:
                    self.agents[agent][group][1][sample].at = ""
                    self.post(agent, CORE, c.SampleMoves(left=[(group, info.name, 1)]))
                if lost:
                    self._ask(agent, lost)
            if info.alive:
                known[info.name] = info.endpoint

    def _forget_on_the_way(self, group: int) -> None:
        for channel, messages in self.channels.items():
            self.channels[channel] = deque(m for m in messages if not (isinstance(m, Work) and m.key[0] == group))

    # ---- instances ---------------------------------------------------------------------------------------------

    def _instance_hears(self, instance: Instance, sender: str, message: object) -> None:
        match message:
            case c.Pull():
                instance.order = message
            case c.HandBack():
                self._hand_back(instance, FINISH_MIGRATED)
            case Work():
                fits = message.min_version <= instance.version and message.incarnation == instance.incarnation
                if fits:
                    assert message.key not in instance.samples, f"{message.key} came twice"
                    instance.samples[message.key] = message
                else:
                    self.post(instance.name, sender, Chunk(message.key, message.made, FINISH_REFUSED))

    def _hand_back(self, instance: Instance, finish: str, keys: list[Key] | None = None) -> None:
        for key in list(instance.samples) if keys is None else keys:
            work = instance.samples.pop(key)
            self.post(instance.name, self._agent_of(key), Chunk(key, work.made, finish))

    def _agent_of(self, key: Key) -> str:
        return next((name for name, held in self.agents.items() if key[0] in held), next(iter(self.agents)))

    def decode(self, instance: Instance) -> None:
        """One token for each sample there."""
        for key, work in list(instance.samples.items()):
            work.made += 1
            instance.tokens += 1
            finish = FINISH_STOP if work.made >= work.length else ""
            self.post(instance.name, self._agent_of(key), Chunk(key, work.made, finish))
            if finish:
                del instance.samples[key]

    def report(self, instance: Instance) -> None:
        instance.steps += 1
        stats = EngineStats(
            running=len(instance.samples),
            kv_usage=min(1.0, len(instance.samples) / 16),
            kv_tokens=sum(work.made for work in instance.samples.values()),
            generated_tokens=instance.tokens,
        )
        self.post(instance.name, CORE, c.InstanceStatus(stats=stats, at_s=self.run.now))

    def switch(self, instance: Instance) -> None:
        """The weights that were ordered have arrived."""
        order = instance.order
        if order is None or (instance.samples and not order.abort_running):
            return
        self.post(instance.name, CORE, c.PullStarted(version=order.version))
        self.post(instance.name, CORE, c.Switching(version=order.version))
        self._hand_back(instance, FINISH_ABORT)
        instance.version, instance.incarnation, instance.order = order.version, order.incarnation, None
        self.post(
            instance.name,
            CORE,
            c.PullDone(version=order.version, incarnation=order.incarnation, pull_s=0.1, pause_s=0.01, nbytes=1),
        )

    def fail_pull(self, instance: Instance) -> None:
        if instance.order is not None:
            self.post(instance.name, CORE, c.PullFailed(version=instance.order.version, cause="broken on purpose"))
            instance.order = None

    def preempt(self, instance: Instance) -> None:
        """The youngest sample is handed back to the router."""
        if instance.samples:
            self._hand_back(instance, "preempted", [list(instance.samples)[-1]])

    def kill(self, instance: Instance) -> None:
        instance.alive, instance.samples, instance.order = False, {}, None
        instance.version = instance.incarnation = -1
        for channel in [channel for channel in self.channels if instance.name in channel]:
            del self.channels[channel]
        self.run.core.lost(instance.name, "killed", self.run.now)
        self.hears(self.run.settle())
        for channel in [channel for channel in self.channels if channel == (CORE, instance.name)]:
            del self.channels[channel]

    def restart(self, instance: Instance) -> None:
        instance.alive, instance.starts = True, instance.starts + 1
        self.hears(self.run.instance(instance.name, endpoint=instance.endpoint))

    # ---- trainer -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """One step on the buffer that is here; the run ends with the last one."""
        assert self.buffer is not None
        groups, self.buffer = self.buffer.groups, None
        incarnation = self.run.core.staleness.incarnation
        if groups:
            self.version += 1
            self.post(TRAINER, CORE, c.Published(version=self.version, incarnation=incarnation))
        if not groups or self.version == self.run.core.staleness.total_steps:
            self.post(TRAINER, CORE, c.TrainerDone(version=self.version, drained=False))
        else:
            self.post(TRAINER, CORE, c.WantBuffer(buffer=self.version, incarnation=incarnation))

    # ---- what can happen ---------------------------------------------------------------------------------------

    def pass_time(self, seconds: float = 0.1) -> None:
        self.run.now += seconds
        self.hears(self.run.settle())

    def possible(self) -> list[tuple[str, Callable[[], None]]]:
        """Everything that can happen next, in a fixed order."""
        moves = [
            (f"{a}>{b}", lambda k=(a, b): self.deliver(k)) for (a, b), queue in sorted(self.channels.items()) if queue
        ]
        for name, instance in self.instances.items():
            if instance.alive:
                moves += [
                    (f"decode {name}", lambda i=instance: self.decode(i)),
                    (f"switch {name}", lambda i=instance: self.switch(i)),
                    (f"report {name}", lambda i=instance: self.report(i)),
                ]
        if self.buffer is not None:
            moves.append(("train", self.train))
        return [*moves, ("time", self.pass_time)]

    def faults(self) -> list[tuple[str, Callable[[], None]]]:
        moves = []
        alive = [i for i in self.instances.values() if i.alive]
        for instance in alive:
            moves.append((f"preempt {instance.name}", lambda i=instance: self.preempt(i)))
            moves.append((f"fail {instance.name}", lambda i=instance: self.fail_pull(i)))
            if len(alive) > 1:
                moves.append((f"kill {instance.name}", lambda i=instance: self.kill(i)))
        dead = [i for i in self.instances.values() if not i.alive]
        return moves + [(f"restart {i.name}", lambda i=i: self.restart(i)) for i in dead]

    def calm(self, rounds: int) -> None:
        """From now on nothing goes wrong, and everything that can happen does. Raises AssertionError if the run is not over
        after so many rounds."""
        for _ in range(rounds):
            if self.over:
                return
            for _, move in self.possible():
                move()
            while any(self.channels.values()):
                for channel in [channel for channel, queue in sorted(self.channels.items()) if queue]:
                    while self.channels[channel]:
                        self.deliver(channel)
        raise AssertionError(f"the run goes on for ever: {self.run.core.staleness.describe()}")

    # ---- what must hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Each sample is at one instance at most, those on their way there included."""
        places = [key for instance in self.instances.values() for key in instance.samples]
        places += [m.key for messages in self.channels.values() for m in messages if isinstance(m, Work)]
        assert len(places) == len(set(places)), "a sample is at two places"

    def check_end(self, buffer_entries: int, staleness: int) -> None:
        """The run is complete, and its journal accounts for every group."""
        ended = self.run.core.ended
        assert ended is not None and ended.status == "completed", ended
        report = audit(self.run.records, buffer_entries=buffer_entries, staleness=staleness)
        assert report.findings == [], report.lines()
