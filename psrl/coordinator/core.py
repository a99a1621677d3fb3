"""The coordinator's decisions: messages in, messages and journal records out. No I/O, no clock, no threads.

The service around it journals `records` before it sends `outbox`, so that whatever another role learns is already
durable. A simulator can drive the same class on a virtual clock.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from psrl.coordinator.placement import Placement
from psrl.coordinator.prompts import PromptSource
from psrl.coordinator.records import AnyRecord, Occupy, Position, Release
from psrl.coordinator.routing import Router, eligible
from psrl.coordinator.staleness import Entry, Staleness, StalenessViolation
from psrl.coordinator.sync import greedy_pulls
from psrl.coordinator.views import AgentView, InstanceView
from psrl.protocol import control as c

log = logging.getLogger("psrl.coordinator")

QUARANTINE_S = 2.0
"""After a failed pull an instance is left alone this long before the next try."""
CLAIM_GRACE_S = 15.0
"""After a coordinator restart an open reservation that no agent loop claims in this time returns to the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the coordinator reads of the configuration."""

    samples_per_group: int
    partial_rollout: bool
    max_concurrent: int
    reject_on_waiting: bool
    max_group_retries: int
    drop_last: bool
    num_instances: int
    num_agents: int
    startup_timeout_s: float
    """Longest time without an instance that has weights, or without an agent loop: at the start or later."""
    missing_timeout_s: float
    """A trainer or supervisor whose connection is lost must be back within this."""


class Coordinator:
    """One run's coordinator. Feed it with `handle`, `lost`, `tick`; take `records` and `outbox` after each.

    The state that survives lives in `staleness` and `prompts` (rebuilt from the ledger); the rest is told again by the
    roles when they say hello.
    """

    def __init__(
        self, settings: Settings, staleness: Staleness, prompts: PromptSource, router: Router, epoch: int, now_s: float
    ) -> None:
        self.settings = settings
        self.staleness = staleness
        self.prompts = prompts
        self.router = router
        self.epoch = epoch
        self.records: list[AnyRecord] = []
        self.outbox: list[tuple[str, c.Message]] = []
        self.placement = Placement()
        self.supervisors: set[str] = set()
        self.trainer = ""
        self.pullable_version = -1
        self.wanted_buffer = -1
        self.waiting_routes: deque[tuple[str, int, int]] = deque()
        self.counters: Counter[str] = Counter()
        self.missing: dict[str, float] = {}
        self.gone_for_good: dict[str, set[str]] = {"instance": set(), "agent_loop": set()}
        self.draining: c.Drain | None = None
        self.ended: c.Shutdown | None = None
        self.pids: dict[str, int] = {}
        self.started_s = self.last_ready_s = now_s
        for r in staleness.open_groups():
            self.placement.open(r.group, Position(r.data_epoch, r.prompt, r.attempt), r.version)

    # ---- what the service calls ------------------------------------------------------------------------------

    def handle(self, sender: str, message: c.Message, now_s: float) -> None:
        """One message of the role named `sender`. `advance` follows once for many."""
        if self.ended is not None:
            self._say(sender, self.ended)
            return
        self.HANDLERS[type(message)](self, sender, message, now_s)

    def lost(self, name: str, cause: str, now_s: float) -> None:
        """The connection of a role is gone."""
        if self.ended is not None:  # everybody leaves now
            return
        if name in self.placement.instances:
            self._instance_down(name, cause)
        elif name in self.placement.agents:
            held = self.placement.held_by(name)
            for group in held:
                self._release(group, "agent_loop_lost", f"{name}: {cause}", requeue=True)
            del self.placement.agents[name]
            log.warning("agent loop %s is gone (%s); its %d groups return to the queue", name, cause, len(held))
        elif name == self.trainer or name in self.supervisors:
            self.missing.setdefault(name, now_s + self.settings.missing_timeout_s)

    def tick(self, now_s: float) -> None:
        """Deadlines; call it at least every `coordinator_sync_interval_in_ms`."""
        if now_s - self.started_s >= CLAIM_GRACE_S:
            for group in self.placement.unclaimed():
                self._release(group, "unclaimed", requeue=True)
        for name, deadline_s in self.missing.items():
            if now_s >= deadline_s:
                self.end("failed", f"{name} has been unreachable for {self.settings.missing_timeout_s:g} s")
        limit_s = self.settings.startup_timeout_s
        if not (lacking := self._lacking()):
            self.last_ready_s = now_s
        elif now_s - self.last_ready_s > limit_s:
            self.end("failed", f"{lacking} was not there for psrl.fault_tolerance.startup_timeout_s={limit_s:g} s")

    def _lacking(self) -> str:
        """What the run cannot go on without at this moment; "" if nothing."""
        if not any(i.alive and i.version >= 0 for i in self.placement.instances.values()):
            return "the trainer" if self.pullable_version < 0 else "a rollout instance with weights"
        return "" if self.placement.agents else "an agent loop"

    def advance(self, now_s: float) -> None:
        """Everything that can go on now does: pulls, waiting samples, new groups, the next buffer."""
        if self.ended is not None:
            return
        self._sync(now_s)
        self._route_waiting()
        if self.draining is None:
            self._dispatch()
            self._ship()

    def end(self, status: str, cause: str) -> None:
        """The run is over; every role is told. The first verdict counts."""
        if self.ended is None:
            self.ended = c.Shutdown(status=status, cause=cause)
            for name in {*self.placement.agents, *self.placement.instances, *self.supervisors, self.trainer} - {""}:
                self._say(name, self.ended)

    # ---- hello -----------------------------------------------------------------------------------------------

    def _hello(self, sender: str, hello: c.Hello, now_s: float) -> None:
        before = len(self.outbox)
        self.missing.pop(sender, None)
        self.pids[sender] = hello.pid
        match hello.state:
            case c.InstanceState() as state:
                self._instance_hello(sender, state)
            case c.AgentState() as state:
                self._agent_hello(sender, state, now_s)
            case c.TrainerState() as state:
                self._trainer_hello(sender, state)
            case c.SupervisorState() as state:
                self.supervisors.add(sender)
                for down in state.gone:
                    self._gone_for_good(down)
        welcome = c.Welcome(
            epoch=self.epoch, incarnation=self.staleness.incarnation, hello_sent_s=hello.sent_s, now_s=now_s
        )
        self.outbox.insert(before, (sender, welcome))

    def _instance_hello(self, name: str, state: c.InstanceState) -> None:
        known = self.placement.instances.get(name)
        if known is not None and known.alive and known.endpoint != state.endpoint:
            self._instance_down(name, "a new start of it said hello")
        if known is None or not known.alive:
            known = InstanceView(name, state.endpoint, state.max_concurrent)
            self.placement.add_instance(known)
            log.info("instance %s is here", name)
        known.version, known.incarnation, known.pulling, known.draining = state.version, state.incarnation, -1, False
        self._announce_instances()

    def _agent_hello(self, name: str, state: c.AgentState, now_s: float) -> None:
        agent = self.placement.agents[name] = AgentView(name)
        held = {h.group: h for h in state.held}
        for group, open_group in list(self.placement.groups.items()):
            if group in held:
                self.placement.claim(group, name, held[group].on)
            elif open_group.agent == name:
                self._release(group, "agent_loop_lost", "it came back without the group", requeue=True)
        for h in state.held:
            if h.group not in agent.groups:  # sealed in the ledger already, or released: nothing is left to do for it
                self._say(name, c.GroupAbort(groups=[h.group], reason="closed"))
            elif h.done is not None:
                self._group_done(name, h.done, now_s)
        self._say(name, c.Instances(instances=[i.info() for i in self.placement.instances.values()]))

    def _trainer_hello(self, name: str, state: c.TrainerState) -> None:
        self.trainer = name
        try:
            starts = self.staleness.start(state.resumed_from, state.start_nonce)
        except StalenessViolation as error:  # of its checkpoint, not of ours: a restart would meet it again
            self.end("failed", f"{name} cannot go on: {error}")
            return
        if starts:
            # A new trainer: what its checkpoint does not cover is open again, every instance must pull again.
            for group in list(self.placement.groups):
                self._abort(group, "restart")
            self.waiting_routes.clear()
            self._apply_all(starts)
            log.info("incarnation %d starts at version %d", self.staleness.incarnation, self.staleness.version)
        self.pullable_version = -1
        self._weights_published(state.published)
        if record := self.staleness.checkpoint(state.checkpoint):
            self._apply(record)
        self.wanted_buffer = state.wants

    # ---- deaths, drain, end ----------------------------------------------------------------------------------

    def _leaving(self, sender: str, message: c.Leaving, now_s: float) -> None:
        self.lost(sender, message.reason or "left", now_s)

    def _child_down(self, sender: str, down: c.ChildDown, now_s: float) -> None:
        log.warning(
            "%s %s ended by %s%s", down.role, down.name, down.cause, "; it is started again" if down.restarting else ""
        )
        self.counters[f"deaths/{down.role}"] += 1
        if self.pids.get(down.name) == down.pid:
            self.lost(down.name, down.cause, now_s)
        if not down.restarting:
            self._gone_for_good(down)

    def _gone_for_good(self, down: c.ChildDown) -> None:
        """No restart is left: the run ends if it cannot do without."""
        gone = self.gone_for_good.get(down.role, set())
        gone.add(down.name)
        if down.role == "trainer":
            self.end("failed", f"{down.name} ended by {down.cause}")
        elif down.role == "instance" and len(gone) >= self.settings.num_instances:
            self.end(
                "failed", f"the last rollout instance is gone: {down.name} ended by {down.cause}, no restart is left"
            )
        elif down.role == "agent_loop" and len(gone) >= self.settings.num_agents:
            self.end("failed", f"the last agent loop is gone: {down.name} ended by {down.cause}, no restart is left")

    def _fatal(self, sender: str, fatal: c.Fatal, now_s: float) -> None:
        self.end("failed", f"{sender}: {fatal.cause}")

    def _instance_down(self, name: str, cause: str) -> None:
        if self.placement.instances[name].alive:
            log.warning("instance %s is gone (%s); its requests go to others", name, cause)
            self.placement.instance_gone(name)
            self._announce_instances()

    def _drain(self, sender: str, drain: c.Drain, now_s: float) -> None:
        if self.draining is not None:
            return
        log.warning("draining: %s", drain.reason)
        self.draining = drain
        if self.trainer:
            self._say(self.trainer, c.DrainNow(reason=drain.reason, grace_s=drain.grace_s))
        else:
            self.end("interrupted", drain.reason)

    def _trainer_done(self, sender: str, done: c.TrainerDone, now_s: float) -> None:
        if done.drained:
            self.end("interrupted", self.draining.reason if self.draining else "drained")
        else:
            self.end("completed", "")

    # ---- instances -------------------------------------------------------------------------------------------

    def _instance_status(self, sender: str, status: c.InstanceStatus, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            view.stats = status.stats

    def _pull_started(self, sender: str, message: c.PullStarted, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            view.pulling = message.version

    def _pull_done(self, sender: str, done: c.PullDone, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            view.version, view.incarnation, view.pulling, view.draining = done.version, done.incarnation, -1, False

    def _pull_failed(self, sender: str, failed: c.PullFailed, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            log.warning(
                "%s could not pull version %d: %s; next try in %g s", sender, failed.version, failed.cause, QUARANTINE_S
            )
            self.counters["failed_pulls"] += 1
            view.pulling, view.draining = -1, False
            view.quarantined_until_s = now_s + QUARANTINE_S

    def _sync(self, now_s: float) -> None:
        """Tell instances to pull. Only what the ledger knows as published is pulled, and only once it can be."""
        version, incarnation = self.staleness.version, self.staleness.incarnation
        if self.pullable_version < version:
            return
        for view in greedy_pulls(
            self.placement.instances.values(), version=version, incarnation=incarnation, now_s=now_s
        ):
            view.pulling = version
            view.draining = not self.settings.partial_rollout
            self._say(
                view.name, c.Pull(version=version, incarnation=incarnation, abort_running=self.settings.partial_rollout)
            )

    def _announce_instances(self) -> None:
        message = c.Instances(instances=[i.info() for i in self.placement.instances.values()])
        for name in self.placement.agents:
            self._say(name, message)

    # ---- groups ----------------------------------------------------------------------------------------------

    def _candidates(self, num_samples: int, min_version: int) -> list[InstanceView]:
        return eligible(
            self.placement.instances.values(),
            incarnation=self.staleness.incarnation,
            num_samples=num_samples,
            min_version=min_version,
            limit=self.settings.max_concurrent,
            reject_on_waiting=self.settings.reject_on_waiting,
        )

    def _dispatch(self) -> None:
        """Reserve and hand out new groups while an instance, an agent loop, a prompt and a place are there."""
        batch: dict[str, list[c.Assignment]] = {}
        n = self.settings.samples_per_group
        while self.placement.agents and (position := self.prompts.peek()) is not None:
            candidates = self._candidates(n, 0)
            admissible = {v for v in {i.version for i in candidates} if self.staleness.can_reserve(v)}
            candidates = [i for i in candidates if i.version in admissible]
            if not candidates:
                break
            instance = self.router.choose(candidates, n)
            reserve = self.staleness.reserve(
                version=instance.version,
                data_epoch=position.data_epoch,
                prompt=position.prompt,
                instance=instance.name,
                attempt=position.attempt,
            )
            if reserve is None:
                break
            self._apply(reserve)
            agent = self.placement.least_busy_agent().name
            self.placement.open(reserve.group, position, reserve.version, agent, {instance.name: n})
            assignment = c.Assignment(
                group=reserve.group,
                data_epoch=reserve.data_epoch,
                prompt=reserve.prompt,
                n=n,
                version=reserve.version,
                incarnation=self.staleness.incarnation,
                instance=instance.name,
                attempt=reserve.attempt,
            )
            batch.setdefault(agent, []).append(assignment)
        for agent, groups in batch.items():
            self._say(agent, c.Assign(groups=groups))

    def _sample_moves(self, sender: str, moves: c.SampleMoves, now_s: float) -> None:
        for group, instance, count in moves.left:
            self.placement.leave(group, instance, count)

    def _route_request(self, sender: str, request: c.RouteRequest, now_s: float) -> None:
        self.waiting_routes.extend((sender, group, sample) for group, sample in request.samples)

    def _route_waiting(self) -> None:
        """Samples that go on elsewhere come before new groups, in the order of asking; the rest waits."""
        routed: dict[str, list[tuple[int, int, str]]] = {}
        for _ in range(len(self.waiting_routes)):
            agent, group, sample = self.waiting_routes.popleft()
            open_group = self.placement.groups.get(group)
            if open_group is None or open_group.agent != agent:
                continue
            candidates = self._candidates(1, open_group.version)
            if not candidates:
                self.waiting_routes.append((agent, group, sample))
                continue
            instance = self.router.choose(candidates, 1)
            self.placement.arrive(group, instance.name)
            routed.setdefault(agent, []).append((group, sample, instance.name))
        for agent, samples in routed.items():
            self._say(agent, c.Routed(samples=samples, incarnation=self.staleness.incarnation))

    def _group_done(self, sender: str, done: c.GroupDone, now_s: float) -> None:
        for record in self.staleness.occupy(done.group, done.ref, done.reward_mean, done.response_tokens):
            if isinstance(record, Release):
                self._abort(record.group, record.reason)
            elif isinstance(record, Occupy):
                self.placement.close(record.group)
            self._apply(record)
        self._say(sender, c.GroupAck(groups=[done.group]))

    def _group_failed(self, sender: str, failed: c.GroupFailed, now_s: float) -> None:
        open_group = self.placement.groups.get(failed.group)
        if open_group is None:
            return
        position = open_group.position
        self.counters[failed.reason] += 1
        self.counters[f"{failed.reason}/prompt_{position.prompt}"] += 1
        retry = failed.retry and position.attempt < self.settings.max_group_retries
        verdict = "it is tried again" if retry else "it is dropped and replaced"
        log.warning(
            "group %d (prompt %d): %s: %s; %s", failed.group, position.prompt, failed.reason, failed.detail, verdict
        )
        self._release(failed.group, failed.reason, failed.detail, requeue=retry)

    def _abort(self, group: int, reason: str) -> None:
        """Take a group out of its agent loop's hands (its Release record is the caller's)."""
        if agent := self.placement.close(group):
            self._say(agent, c.GroupAbort(groups=[group], reason=reason))

    def _release(self, group: int, reason: str, detail: str = "", *, requeue: bool) -> None:
        self.placement.close(group)
        self._apply(self.staleness.release(group, reason, requeue=requeue, detail=detail))

    # ---- trainer ---------------------------------------------------------------------------------------------

    def _want_buffer(self, sender: str, want: c.WantBuffer, now_s: float) -> None:
        if want.incarnation == self.staleness.incarnation:
            self.wanted_buffer = want.buffer

    def _ship(self) -> None:
        """Give the trainer its buffer as soon as it is full, or tell it that there is none left."""
        buffer = self.wanted_buffer
        if buffer < 0:
            return
        if self.prompts.exhausted and not self.staleness.num_open and not self.staleness.ready(buffer):
            self._apply_all(self.staleness.end_of_data(self.settings.drop_last))
        if self.staleness.data_ended(buffer):
            self._send_buffer(buffer, [])
        elif take := self.staleness.take(buffer):
            self._apply(take)
            self._send_buffer(buffer, self.staleness.entries(buffer))
        elif buffer < self.staleness.lo:  # taken before: the answer was lost with a coordinator
            self._send_buffer(buffer, self.staleness.entries(buffer))

    def _send_buffer(self, buffer: int, entries: list[Entry]) -> None:
        self.wanted_buffer = -1
        groups = [
            c.TakenGroup(group=e.group, prompt=e.prompt, data_epoch=e.data_epoch, version=e.version, ref=e.ref)
            for e in entries
        ]
        self._say(self.trainer, c.Buffer(buffer=buffer, groups=groups, counters=dict(self.counters)))

    def _published(self, sender: str, published: c.Published, now_s: float) -> None:
        if published.incarnation == self.staleness.incarnation:
            self._weights_published(published.version)

    def _weights_published(self, version: int) -> None:
        if record := self.staleness.publish(version):
            self._apply(record)
        self.pullable_version = max(self.pullable_version, version)

    def _checkpoint_done(self, sender: str, done: c.CheckpointDone, now_s: float) -> None:
        if record := self.staleness.checkpoint(done.version):
            self._apply(record)

    # ---- small -----------------------------------------------------------------------------------------------

    def _apply_all(self, records: Iterable[AnyRecord]) -> None:
        for record in records:
            self._apply(record)

    def _apply(self, record: AnyRecord) -> None:
        self.staleness.apply(record)
        self.prompts.apply(record)
        self.records.append(record)

    def _say(self, name: str, message: c.Message) -> None:
        self.outbox.append((name, message))

    HANDLERS: ClassVar[dict[type, Callable[[Any, str, Any, float], None]]] = {
        c.Hello: _hello,
        c.Leaving: _leaving,
        c.Fatal: _fatal,
        c.ChildDown: _child_down,
        c.Drain: _drain,
        c.InstanceStatus: _instance_status,
        c.PullStarted: _pull_started,
        c.PullDone: _pull_done,
        c.PullFailed: _pull_failed,
        c.SampleMoves: _sample_moves,
        c.RouteRequest: _route_request,
        c.GroupDone: _group_done,
        c.GroupFailed: _group_failed,
        c.WantBuffer: _want_buffer,
        c.Published: _published,
        c.CheckpointDone: _checkpoint_done,
        c.TrainerDone: _trainer_done,
    }
