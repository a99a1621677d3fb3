"""What the coordinator knows of a run, and the few moves that change it: the journal, the outbox, open groups.

The state that survives lives in `staleness` and `prompts` (rebuilt from the ledger); the rest is told again by the roles
when they say hello.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from psrl.coordinator.placement import Placement
from psrl.coordinator.prompts import PromptSource
from psrl.coordinator.records import AnyRecord, Occupy, Position, Release
from psrl.coordinator.routing import Router
from psrl.coordinator.staleness import Staleness
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
        self.joined: dict[str, set[str]] = {}
        """Supervisors that came to the running run, each with its children; one that was refused has none."""
        self.leaving: set[str] = set()
        """Children that leave on purpose, those that have not yet said hello among them."""
        self.trainer = ""
        self.pullable_version = -1
        self.wanted: c.WantBuffer | None = None
        """What the trainer waits for."""
        self.filled_s: dict[int, float] = {}
        """When each buffer that is not consumed was filled, where this coordinator has seen it."""
        self.waiting_routes: deque[tuple[str, int, int]] = deque()
        self.counters: Counter[str] = Counter()
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
            self.placement.open(r.group, Position(r.data_epoch, r.prompt, r.attempt), r.version)

    def end(self, status: str, cause: str) -> None:
        """The run is over; every role is told. The first verdict counts."""
        if self.ended is None:
            self.ended = c.Shutdown(status=status, cause=cause)
            for name in {
                *self.placement.agents,
                *self.placement.instances,
                *self.supervisors,
                *self.joined,
                self.trainer,
            } - {""}:
                self._say(name, self.ended)

    # ---- moves -----------------------------------------------------------------------------------------------

    def _group_done(self, sender: str, done: c.GroupDone, now_s: float) -> None:
        for record in self.staleness.occupy(done.group, done.ref, done.reward_mean, done.response_tokens):
            if isinstance(record, Release):
                self._abort(record.group, record.reason)
            elif isinstance(record, Occupy):
                self.placement.close(record.group)
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
        self._announce_instances(gone.info(alive=False))

    def _announce_instances(self, *gone: c.InstanceInfo) -> None:
        message = c.Instances(instances=[*gone, *(i.info() for i in self.placement.instances.values())])
        for name in self.placement.agents:
            self._say(name, message)

    def _abort(self, group: int, reason: str) -> None:
        """Take a group out of its agent loop's hands (its Release record is the caller's)."""
        if agent := self.placement.close(group):
            self._say(agent, c.GroupAbort(groups=[group], reason=reason))

    def _release(self, group: int, reason: str, detail: str = "", *, requeue: bool) -> None:
        self.placement.close(group)
        self._apply(self.staleness.release(group, reason, requeue=requeue, detail=detail))

    def _apply_all(self, records: Iterable[AnyRecord]) -> None:
        for record in records:
            self._apply(record)

    def _apply(self, record: AnyRecord) -> None:
        self.staleness.apply(record)
        self.prompts.apply(record)
        self.records.append(record)

    def _say(self, name: str, message: c.Message) -> None:
        self.outbox.append((name, message))
