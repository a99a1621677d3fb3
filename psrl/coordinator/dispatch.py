"""Which agent loop makes which group, and at which instance its samples are made.

A round places what waits, then new groups. Work that finds no place (none has room, or its method holds it back) closes
the versions that it might use for the rest of the round: what comes after it may take older weights only. So nothing is
overtaken for ever, and a round costs what it places, however much waits.
"""

from __future__ import annotations

import math
from collections import defaultdict

from psrl.coordinator.membership import Membership
from psrl.coordinator.placement import OpenGroup
from psrl.coordinator.placing import preferred, sample_blocks
from psrl.coordinator.records import Position, Reserve
from psrl.coordinator.routing.base import Work
from psrl.coordinator.views import UNLIMITED, InstanceView
from psrl.coordinator.waiting import Waiting
from psrl.protocol import control as c
from psrl.protocol.generation import FINISH_ABORT, FINISH_MIGRATED, FINISH_PREEMPTED, TURN

COUNTED = {
    FINISH_ABORT: "interrupted_samples",
    FINISH_MIGRATED: "migrated_samples",
    FINISH_PREEMPTED: "preempted_samples",
}
"""Samples that come back unfinished, by what brought them back: new weights, a migration, a KV cache that is full."""
Routes = dict[str, list[tuple[int, int, str]]]
"""Agent loop -> (group, sample, instance)."""
UNBOUND = (FINISH_MIGRATED, FINISH_PREEMPTED)
"""They left to go elsewhere."""


class Dispatch(Membership):
    """New groups and samples that go on elsewhere, matched with instances that may take them."""

    # ---- samples on the move ---------------------------------------------------------------------------------

    def _route_request(self, sender: str, request: c.RouteRequest, now_s: float) -> None:
        if counter := COUNTED.get(request.reason):
            self.counters[counter] += len(request.samples)
        if request.reason == FINISH_PREEMPTED and (view := self.placement.instances.get(request.instance)):
            view.fits = view.in_flight or UNLIMITED
        tokens = request.tokens or [0] * len(request.samples)
        names = request.blocks or [[]] * len(request.samples)
        for (group, sample), made, blocks in zip(request.samples, tokens, names, strict=True):
            if (open_group := self.placement.groups.get(group)) is None or open_group.agent != sender:
                continue
            waiting = Waiting(
                agent=sender,
                group=group,
                sample=sample,
                version=open_group.version,
                since_s=now_s,
                tokens=made,
                came_from=request.instance,
                blocks=tuple(blocks),
                turn=request.reason == TURN,
                unbound=request.reason in UNBOUND,
            )
            self._look_for_place(open_group, waiting)
            if waiting.unbound and self.router.block_size and (view := self.placement.instances.get(request.instance)):
                self.router.left_behind(view, self._sample_work(open_group, waiting))

    def _look_for_place(self, open_group: OpenGroup, waiting: Waiting) -> None:
        """A session that is back passes the gate first, if there is one."""
        if self.gate is None:
            self.waiting_routes.add(waiting)
        elif waiting.turn:
            self.gate.asks(waiting, self._prompt_tokens(open_group))
        else:
            self.gate.interrupted(waiting, self._prompt_tokens(open_group))
            self.waiting_routes.add(waiting)

    def _turns_ended(self, sender: str, message: c.TurnsEnded, now_s: float) -> None:
        self.counters["sessions/away"] += len(message.away)
        if self.gate is None:
            return
        for group, sample, instance, tokens in message.away:
            if (open_group := self.placement.groups.get(group)) is not None and open_group.agent == sender:
                prompt = self._prompt_tokens(open_group)
                self.gate.turn_ended((group, sample), open_group.version, prompt, instance, tokens)
        for group, sample, _ in message.over:
            self.gate.over((group, sample))

    def _route_waiting(self, now_s: float) -> None:
        """Samples that go on elsewhere come before new groups, and before them those that were held back between two turns."""
        self.considered_s, self.closed_from = now_s, math.inf
        patient_since_s = now_s - self.settings.placing.patience_s
        routed: Routes = defaultdict(list)
        self._open_gate(now_s, routed)
        while waiting := self.waiting_routes.first(below=self.closed_from, waiting_since_s=patient_since_s):
            open_group = self.placement.groups.get(waiting.group)
            if open_group is None or open_group.agent != waiting.agent:
                self.waiting_routes.remove(waiting)
                continue
            work = self._sample_work(open_group, waiting, may_wait=waiting.since_s > patient_since_s)
            view = self._bound_to(open_group, waiting) or self._choose(work, at_least=open_group.version)
            if self.gate is not None:
                view = self.gate.own_place(waiting, view)
                if self.gate.holds(waiting):
                    self.waiting_routes.remove(waiting)
                    self.gate.asks(waiting, self._prompt_tokens(open_group))
                    continue
            if view is None:
                self.closed_from = waiting.version
                continue
            self.waiting_routes.remove(waiting)
            self._go(open_group, waiting, view, work, routed)
        for agent, samples in routed.items():
            self._say(agent, c.Routed(samples=samples, incarnation=self.staleness.incarnation))

    def _open_gate(self, now_s: float, routed: Routes) -> None:
        if self.gate is None:
            return
        for waiting, view in self.gate.ready(now_s, self.staleness.incarnation):
            open_group = self.placement.groups[waiting.group]
            if view is None:
                self.waiting_routes.add(waiting)
            else:
                self._go(open_group, waiting, view, self._sample_work(open_group, waiting), routed)

    def _go(self, open_group: OpenGroup, waiting: Waiting, view: InstanceView, work: Work, routed: Routes) -> None:
        self.placement.arrive(waiting.group, view.name, work.weight)
        self.router.placed(view, work)
        if self.gate is not None:
            self.gate.placed(waiting, self._prompt_tokens(open_group), view.name)
        routed[waiting.agent].append((waiting.group, waiting.sample, view.name))

    def _bound_to(self, open_group: OpenGroup, waiting: Waiting) -> InstanceView | None:
        """The instance that stickiness asks for, if it may take the sample now; it never waits for one that may not."""
        placing = self.settings.placing
        if waiting.unbound:
            return None
        names = [waiting.came_from] if placing.trajectory_sticky else []
        if placing.group_sticky:
            names += sorted(open_group.on, key=lambda name: (-open_group.on[name], name))
        for name in names:
            view = self.placement.instances.get(name)
            if (
                view is not None
                and view.incarnation == self.staleness.incarnation
                and view.version >= open_group.version
                and self.fleet.may_take(view, 1)
            ):
                return view
        return None

    def _choose(self, work: Work, at_least: int) -> InstanceView | None:
        incarnation = self.staleness.incarnation
        versions = [v for v in self.fleet.versions(incarnation) if v >= at_least]
        return self.fleet.choose(work, incarnation, versions)

    # ---- new groups ------------------------------------------------------------------------------------------

    def _dispatch(self, now_s: float) -> None:
        """Reserve and hand out new groups while an instance, an agent loop, a prompt and a place are there."""
        batch: dict[str, list[c.Assignment]] = {}
        self._look_at_shares(now_s)
        while (agent := self.placement.least_busy_agent()) and (position := self.prompts.peek()) is not None:
            work = self._group_work(position)
            instance = self.fleet.choose(work, self.staleness.incarnation, self._reservable(position))
            if instance is None:
                break
            if self.shares.sated(instance, now_s):
                continue
            prompt_tokens = self.facts(position.prompt).tokens if self.gate is not None else 0
            if self.gate is not None and not self.gate.has_room(instance, prompt_tokens):
                continue
            reserve = self.staleness.reserve(
                version=instance.version,
                data_epoch=position.data_epoch,
                prompt=position.prompt,
                instance=instance.name,
                attempt=position.attempt,
                protected=position.protected,
            )
            if reserve is None:
                break
            self._apply(reserve)
            at, each = {instance.name: work.num_samples}, work.weight / work.num_samples
            self.placement.open(reserve.group, position, reserve.version, agent.name, at, each)
            self.router.placed(instance, work)
            if self.gate is not None:
                self.gate.opened(reserve.group, reserve.version, prompt_tokens, work.num_samples, instance.name)
            self.counters["samples/launched"] += work.num_samples
            batch.setdefault(agent.name, []).append(self._assignment(reserve))
        for name, groups in batch.items():
            self._say(name, c.Assign(groups=groups))

    def _look_at_shares(self, now_s: float) -> None:
        """Keep a part of what may begin now for those that are about to have new weights."""
        placement, each = self.placement, self.settings.samples_per_group
        self.shares.look(
            samples=lambda: placement.in_flight + each * self.staleness.room(),
            staying=len(placement.instances) - len(self.retiring & placement.instances.keys()),
            pulling=self.lagging.num_pulling,
            absent=max(0, self.settings.num_instances - self.most_instances),
            changed=placement.changed,
            now_s=now_s,
        )

    def _reservable(self, position: Position) -> list[int]:
        """Versions that this prompt can be promised a place with, in order of preference."""
        staleness = self.staleness
        versions = [
            v
            for v in self.fleet.versions(staleness.incarnation)
            if v < self.closed_from and staleness.can_reserve(v, position.protected)
        ]
        return preferred(versions, self.settings.placing.candidates, staleness.room)

    def _assignment(self, reserve: Reserve) -> c.Assignment:
        return c.Assignment(
            group=reserve.group,
            data_epoch=reserve.data_epoch,
            prompt=reserve.prompt,
            n=self.settings.samples_per_group,
            version=reserve.version,
            incarnation=self.staleness.incarnation,
            instance=reserve.instance,
            attempt=reserve.attempt,
            keep=self.settings.kept_samples,
        )

    # ---- what routing may know -------------------------------------------------------------------------------

    def _group_work(self, position: Position) -> Work:
        n, router = self.settings.samples_per_group, self.router
        if not (router.counts_tokens or router.block_size):
            return Work(n)
        prompt = self.facts(position.prompt)
        return Work(n, float(prompt.tokens), self._remaining(position.prompt, prompt.data_source, 0), prompt.blocks)

    def _sample_work(self, open_group: OpenGroup, waiting: Waiting, may_wait: bool = True) -> Work:
        router, prompt = self.router, open_group.position.prompt
        if not (router.counts_tokens or router.block_size):
            return Work(1, may_wait=may_wait)
        facts = self.facts(prompt)
        return Work(
            1,
            float(facts.tokens + waiting.tokens),
            self._remaining(prompt, facts.data_source, waiting.tokens),
            waiting.blocks or sample_blocks(facts, router.block_size, waiting.group, waiting.sample, waiting.tokens),
            may_wait,
        )

    def _prompt_tokens(self, open_group: OpenGroup) -> int:
        return self.facts(open_group.position.prompt).tokens

    def _remaining(self, prompt: int, data_source: str, so_far: int) -> float:
        if not self.router.counts_budget:
            return 0.0
        return self.lengths.remaining(prompt=prompt, data_source=data_source, so_far=so_far)
