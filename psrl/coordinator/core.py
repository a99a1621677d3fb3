"""The coordinator's decisions: messages in, messages and journal records out. No I/O, no clock, no threads.

The service around it journals `records` before it sends `outbox`, so that whatever another role learns is already
durable. A simulator can drive the same class on a virtual clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from psrl.coordinator.joiners import CLAIM_GRACE_S
from psrl.coordinator.membership import Membership
from psrl.coordinator.routing import eligible
from psrl.coordinator.staleness import Entry
from psrl.coordinator.state import Settings
from psrl.coordinator.sync import greedy_pulls
from psrl.coordinator.views import InstanceView
from psrl.protocol import control as c

__all__ = ["CLAIM_GRACE_S", "QUARANTINE_S", "Coordinator", "Settings"]

log = logging.getLogger("psrl.coordinator")

QUARANTINE_S = 2.0
"""After a failed pull an instance is left alone this long before the next try."""


class Coordinator(Membership):
    """One run's coordinator. Feed it with `handle`, `lost`, `tick`; take `records` and `outbox` after each.

    `RunState` holds what is known, `Joiners` who comes and goes, `Membership` who is there; here is what happens to
    groups, instances and buffers.
    """

    # ---- what the service calls ------------------------------------------------------------------------------

    def handle(self, sender: str, message: c.Message, now_s: float) -> None:
        """One message of the role named `sender`. `advance` follows once for many."""
        if self.ended is not None:
            self._say(sender, self.ended)
            return
        self.HANDLERS[type(message)](self, sender, message, now_s)

    def advance(self, now_s: float) -> None:
        """Everything that can go on now does: pulls, waiting samples, new groups, the next buffer."""
        if self.ended is not None:
            return
        self._sync(now_s)
        self._route_waiting()
        self._dismiss()
        if self.draining is None:
            self._dispatch()
            self._ship()

    # ---- instances -------------------------------------------------------------------------------------------

    def _instance_status(self, sender: str, status: c.InstanceStatus, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            view.stats = status.stats

    def _pull_started(self, sender: str, message: c.PullStarted, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            view.pulling = message.version

    def _pull_done(self, sender: str, done: c.PullDone, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            view.version, view.incarnation, view.pulling, view.draining = (
                done.version,
                done.incarnation,
                -1,
                False,
            )

    def _pull_failed(self, sender: str, failed: c.PullFailed, now_s: float) -> None:
        if view := self.placement.instances.get(sender):
            log.warning(
                "%s could not pull version %d: %s; next try in %g s",
                sender,
                failed.version,
                failed.cause,
                QUARANTINE_S,
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
            self.placement.instances.values(),
            version=version,
            incarnation=incarnation,
            now_s=now_s,
        ):
            view.pulling = version
            view.draining = not self.settings.partial_rollout
            self._say(
                view.name,
                c.Pull(
                    version=version,
                    incarnation=incarnation,
                    abort_running=self.settings.partial_rollout,
                ),
            )

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
        while (agent := self.placement.least_busy_agent()) and (position := self.prompts.peek()) is not None:
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
            self.placement.open(reserve.group, position, reserve.version, agent.name, {instance.name: n})
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
            batch.setdefault(agent.name, []).append(assignment)
        for name, groups in batch.items():
            self._say(name, c.Assign(groups=groups))

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
            "group %d (prompt %d): %s: %s; %s",
            failed.group,
            position.prompt,
            failed.reason,
            failed.detail,
            verdict,
        )
        self._release(failed.group, failed.reason, failed.detail, requeue=retry)

    # ---- trainer ---------------------------------------------------------------------------------------------

    def _want_buffer(self, sender: str, want: c.WantBuffer, now_s: float) -> None:
        if want.incarnation == self.staleness.incarnation:
            self.wanted = want

    def _ship(self) -> None:
        """Give the trainer what it wants of its buffer as soon as that is there, or tell it that there is none left."""
        want = self.wanted
        if want is None:
            return
        buffer, state = want.buffer, self.staleness
        if self.prompts.exhausted and not state.num_open and not state.ready(buffer):
            self._apply_all(state.end_of_data(self.settings.drop_last))
        if state.data_ended(buffer):
            self._send_buffer(want, [], last=True)
            return
        # What was cut before and is asked for again: the answer was lost with a coordinator.
        if len(state.taken_groups(buffer)) == want.taken and (take := state.take(buffer, want.count or None)):
            self._apply(take)
        cut = state.taken_groups(buffer)
        if len(cut) < want.taken:
            self.end("failed", f"the trainer has {want.taken} groups of buffer {buffer}, the ledger cut {len(cut)}")
        elif len(cut) > want.taken or state.is_taken(buffer):
            part = cut[want.taken : want.taken + want.count if want.count else None]
            self._send_buffer(want, part, last=state.is_taken(buffer) and want.taken + len(part) == len(cut))

    def _send_buffer(self, want: c.WantBuffer, entries: list[Entry], *, last: bool) -> None:
        self.wanted = None
        groups = [
            c.TakenGroup(
                group=e.group,
                prompt=e.prompt,
                data_epoch=e.data_epoch,
                version=e.version,
                ref=e.ref,
            )
            for e in entries
        ]
        message = c.Buffer(
            buffer=want.buffer,
            groups=groups,
            counters=dict(self.counters),
            first=want.taken,
            last=last,
            filled_s=self.filled_s.get(want.buffer, -1.0),
        )
        self._say(self.trainer, message)

    def _published(self, sender: str, published: c.Published, now_s: float) -> None:
        if published.incarnation == self.staleness.incarnation:
            self._weights_published(published.version)

    def _checkpoint_done(self, sender: str, done: c.CheckpointDone, now_s: float) -> None:
        if record := self.staleness.checkpoint(done.version):
            self._apply(record)

    HANDLERS: ClassVar[dict[type, Callable[[Any, str, Any, float], None]]] = {
        c.Hello: Membership._hello,
        c.Leaving: Membership._leaving,
        c.Fatal: Membership._fatal,
        c.ChildDown: Membership._child_down,
        c.Drain: Membership._drain,
        c.Leave: Membership._leave,
        c.InstanceStatus: _instance_status,
        c.PullStarted: _pull_started,
        c.PullDone: _pull_done,
        c.PullFailed: _pull_failed,
        c.SampleMoves: _sample_moves,
        c.RouteRequest: _route_request,
        c.GroupDone: Membership._group_done,
        c.GroupFailed: _group_failed,
        c.WantBuffer: _want_buffer,
        c.Published: _published,
        c.CheckpointDone: _checkpoint_done,
        c.TrainerDone: Membership._trainer_done,
    }
