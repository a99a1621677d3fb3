"""Which agent loop makes which group, and at which instance its samples are made."""

from __future__ import annotations

from psrl.coordinator.membership import Membership
from psrl.coordinator.routing import eligible
from psrl.coordinator.views import InstanceView
from psrl.protocol import control as c
from psrl.protocol.generation import FINISH_ABORT, FINISH_MIGRATED

COUNTED = {FINISH_ABORT: "interrupted_samples", FINISH_MIGRATED: "migrated_samples"}
"""Samples that come back unfinished, by what brought them back: a pull of new weights, a migration."""


class Dispatch(Membership):
    """New groups and samples that go on elsewhere, matched with instances that may take them."""

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
            admissible = {
                v for v in {i.version for i in candidates} if self.staleness.can_reserve(v, position.protected)
            }
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
                protected=position.protected,
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

    def _route_request(self, sender: str, request: c.RouteRequest, now_s: float) -> None:
        if counter := COUNTED.get(request.reason):
            self.counters[counter] += len(request.samples)
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
