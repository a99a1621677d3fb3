"""What the coordinator knows of a run, and the few moves that change it: the journal, the outbox, open groups.

The state that survives lives in `staleness` and `prompts` (rebuilt from the ledger); the rest is told again by the roles
when they say hello.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from psrl.coordinator.filters import FilterBudget
from psrl.coordinator.lengths import LengthHistory
from psrl.coordinator.migration import Migrations, MigrationSettings
from psrl.coordinator.placement import Placement
from psrl.coordinator.placing import PlacingSettings, PromptFacts, no_facts
from psrl.coordinator.prompts import PromptSource
from psrl.coordinator.records import AnyRecord, Occupy, Release
from psrl.coordinator.routing.base import Router
from psrl.coordinator.routing.fleet import Fleet
from psrl.coordinator.sessions.gate import SessionGate
from psrl.coordinator.sessions.settings import SessionSettings
from psrl.coordinator.shares import Shares
from psrl.coordinator.staleness import Staleness
from psrl.coordinator.stragglers import StragglerWatch
from psrl.coordinator.sync.lagging import Lagging
from psrl.coordinator.sync.select import make_sync
from psrl.coordinator.sync.settings import SyncSettings
from psrl.coordinator.validation import Validation, ValidationSettings
from psrl.coordinator.waiting import WaitingQueue
from psrl.protocol import control as c

log = logging.getLogger("psrl.coordinator")


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
    max_instances: int
    """Most instances at a time: each agent loop is connected with all of them."""
    startup_timeout_s: float
    """Longest time without an instance that has weights, or without an agent loop: at the start or later."""
    missing_timeout_s: float
    """A trainer or supervisor whose connection is lost must be back within this."""
    drain_grace_s: float
    """For a drain that this coordinator orders itself."""
    goes_on: bool
    """A node that is lost is replaced and the run started again (a scheduler's job), so losing one is no failure."""
    attempt: str
    """The start of the run that this coordinator belongs to."""
    placing: PlacingSettings = field(default_factory=PlacingSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    kept_samples: int = 0
    """A group is complete with so many of its `samples_per_group`; 0: with all."""
    filter_metric: str = "seq_reward"
    max_filtered_buffers: int = 10
    """Buffers' worth of groups without signal in a row that end the run."""
    straggler_method: str | None = None
    """null | retry | truncate: what happens to groups that hold up the trainer's buffer."""
    straggler_threshold: float | None = None
    """Share of the buffer that must be filled before it happens."""
    migration: MigrationSettings | None = None
    """None: samples are not moved away from a busy instance."""
    sessions: SessionSettings | None = None
    """None: nothing is kept for samples between two turns, and none of them waits for room."""
    validation: ValidationSettings | None = None
    """None: nothing is validated."""
    colocate: bool = False
    """Trainer and instances use the same GPUs in turns."""


class RunState:
    """State and primitives. `records` wait for the journal, `outbox` for the sockets."""

    def __init__(
        self,
        settings: Settings,
        staleness: Staleness,
        prompts: PromptSource,
        router: Router,
        epoch: int,
        now_s: float,
        facts: Callable[[int], PromptFacts] = no_facts,
    ) -> None:
        self.settings = settings
        self.staleness = staleness
        self.prompts = prompts
        self.router = router
        self.epoch = epoch
        self.records: list[AnyRecord] = []
        self.outbox: list[tuple[str, c.Message]] = []
        self.fleet = Fleet(
            router,
            limit=settings.max_concurrent,
            reject_on_waiting=settings.reject_on_waiting,
            samples_per_group=settings.samples_per_group,
        )
        self.placement = Placement(self.fleet)
        self.facts = facts
        """What routing may know of a prompt, by its index."""
        self.lengths = LengthHistory(settings.placing.request_budget)
        self.supervisors: set[str] = set()
        self.joined: dict[str, set[str]] = {}
        """Supervisors that came to the running run, each with its children; one that was refused has none."""
        self.leaving: set[str] = set()
        """Children that leave on purpose, those that have not yet said hello among them."""
        self.retiring: set[str] = set()
        """Roles that are here and were told to leave."""
        self.trainer = ""
        self.pullable_version = -1
        self.wanted: c.WantBuffer | None = None
        """What the trainer waits for."""
        self.turn_given = False
        """Instances were told that it is their turn (see coordinator.turns)."""
        self.filled_s: dict[int, float] = {}
        """When each buffer that is not consumed was filled, where this coordinator has seen it."""
        self.waiting_routes = WaitingQueue(settings.placing.sort, settings.placing.oldest_version_first)
        self.considered_s = now_s
        """When waiting samples were last considered, and from which version on nobody found a place then."""
        self.closed_from = math.inf
        self.counters: Counter[str] = Counter()
        self.gate = self._make_gate()
        self.filter_budget = FilterBudget(
            limit=settings.max_filtered_buffers,
            buffer_entries=staleness.buffer_entries,
            metric=settings.filter_metric,
        )
        self.stragglers = StragglerWatch(settings.straggler_method, settings.straggler_threshold)
        self.sync_strategy = make_sync(settings.sync)
        self.lagging = Lagging()
        self.migrations = Migrations()
        self.shares = Shares(settings.placing.patience_s)
        self.most_instances = 0
        """That have been here at a time."""
        self.validation = Validation(settings.validation, self.counters)
        self.training_done = False
        """Nothing can fail the run any more; it may wait for the last validation."""
        self.looked_s = now_s - settings.sync.check_interval_s
        """When all instances were last looked at for sync and migration."""
        self.finished_samples = self.finished_tokens = 0
        """Of groups generated to the end since this start: what a mean response is."""
        self.missing: dict[str, float] = {}
        self.gone_for_good: dict[str, dict[str, str]] = {"instance": {}, "agent_loop": {}}
        """Of what psrl.deployment counts, by role: name -> cause, the newest last."""
        self.draining: c.Drain | None = None
        self.drained_by_s = 0.0
        """When a drain has to be over."""
        self.ended: c.Shutdown | None = None
        self.pids: dict[str, int] = {}
        self.started_s = self.last_ready_s = now_s
        for r in staleness.open_groups():
            self.placement.open(r.group, r.position, r.version)

    def _make_gate(self) -> SessionGate | None:
        settings = self.settings
        if settings.sessions is None:
            return None
        sticky, samples = settings.placing.trajectory_sticky, settings.samples_per_group
        return SessionGate(settings.sessions, self.placement, self.counters, sticky=sticky, samples_per_group=samples)

    @property
    def rollouts_turn(self) -> bool:
        """Instances may use their GPUs: the trainer waits for a buffer, or has GPUs of its own."""
        return not self.settings.colocate or (self.wanted is not None and self.draining is None)

    def end(self, status: str, cause: str) -> None:
        """The run is over; every role is told. The first verdict counts, and once training is done there is but one."""
        if self.ended is None:
            if self.training_done:
                status, cause = "completed", ""
            self.ended = c.Shutdown(status=status, cause=cause)
            for name in {
                *self.placement.agents,
                *self.placement.instances,
                *self.supervisors,
                *self.joined,
                *self.validation.validators,
                self.trainer,
            } - {""}:
                self._say(name, self.ended)

    # ---- moves -----------------------------------------------------------------------------------------------

    def _group_done(self, sender: str, done: c.GroupDone, now_s: float) -> None:
        self.finished_samples += len(done.ref.tokens)
        self.finished_tokens += done.response_tokens
        if self.router.counts_budget and (open_group := self.placement.groups.get(done.group)):
            prompt = open_group.position.prompt
            source = self.facts(prompt).data_source
            self.lengths.note(
                prompt=prompt, data_source=source, tokens=done.response_tokens, samples=len(done.ref.tokens)
            )
        for record in self.staleness.occupy(done.group, done.ref, done.reward_mean, done.response_tokens):
            if isinstance(record, Release):
                self.counters[record.reason] += 1
                self._abort(record.group, record.reason)
            elif isinstance(record, Occupy):
                self._close(record.group)
            self._apply(record)
            if isinstance(record, Occupy) and self.staleness.ready(record.buffer):
                self.filled_s[record.buffer] = now_s
        self._say(sender, c.GroupAck(groups=[done.group]))

    def _weights_published(self, version: int) -> None:
        if record := self.staleness.publish(version):
            self._apply(record)
            self.filled_s = {buffer: at_s for buffer, at_s in self.filled_s.items() if buffer >= version}
        self.pullable_version = max(self.pullable_version, version)

    def _instance_down(self, name: str, cause: str) -> None:
        log.warning("instance %s is gone (%s); its requests go to others", name, cause)
        self._remove_instance(name)

    def _remove_instance(self, name: str) -> None:
        gone = self.placement.remove_instance(name)
        self.lagging.forget(name)
        self.migrations.forget(name)
        if self.gate is not None:
            self.gate.instance_gone(name)
        self._announce_instances(gone.info(alive=False))

    def _announce_instances(self, *gone: c.InstanceInfo) -> None:
        if not self.placement.agents:
            return
        message = c.Instances(instances=[*gone, *(i.info() for i in self.placement.instances.values())])
        for name in self.placement.agents:
            self._say(name, message)

    def _close(self, group: int) -> str:
        """The group is in nobody's hands any more; returns the agent loop that held it."""
        if self.gate is not None:
            self.gate.closed(group)
        return self.placement.close(group)

    def _abort(self, group: int, reason: str) -> None:
        """Take a group out of its agent loop's hands (its Release record is the caller's)."""
        if agent := self._close(group):
            self._say(agent, c.GroupAbort(groups=[group], reason=reason))

    def _release(self, group: int, reason: str, detail: str = "", *, requeue: bool) -> None:
        self._close(group)
        self._apply(self.staleness.release(group, reason, requeue=requeue, detail=detail))

    def _apply_all(self, records: Iterable[AnyRecord]) -> None:
        for record in records:
            self._apply(record)

    def _apply(self, record: AnyRecord) -> None:
        self.staleness.apply(record)
        self.prompts.apply(record)
        self.filter_budget.apply(record)
        self.records.append(record)

    def _say(self, name: str, message: c.Message) -> None:
        self.outbox.append((name, message))
