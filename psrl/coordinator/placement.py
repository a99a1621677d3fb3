"""Who has what right now: open groups, the agent loops that hold them, samples at each instance. Bookkeeping only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from psrl.coordinator.records import Position
from psrl.coordinator.routing.fleet import Fleet
from psrl.coordinator.views import UNLIMITED, AgentView, InstanceView


@dataclass(slots=True)
class OpenGroup:
    """A reservation in an agent loop's hands ("" until one claims it after a coordinator restart)."""

    position: Position
    version: int
    agent: str
    on: dict[str, int] = field(default_factory=dict)
    """Samples at each instance."""
    tokens: dict[str, float] = field(default_factory=dict)
    """KV tokens that they counted for when they were placed, at each instance where they counted for any."""


class Placement:
    """Keeps `InstanceView.in_flight` and `AgentView.groups` equal to what the open groups say, always."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.instances: dict[str, InstanceView] = {}
        self.agents: dict[str, AgentView] = {}
        self.groups: dict[int, OpenGroup] = {}
        self.in_flight = 0
        """Samples at all instances."""
        self.changed: set[str] = set()
        """Instances whose load changed since the last look at them; who looks clears it."""
        self._by_groups: list[tuple[int, str]] = []
        """Heap of (groups, agent loop). A number may be out of date, but for each agent loop one is no higher than is true."""

    def open(
        self,
        group: int,
        position: Position,
        version: int,
        agent: str = "",
        on: Mapping[str, int] | None = None,
        tokens: float = 0.0,
    ) -> None:
        """A new group, its samples at `on`; each counts for `tokens` of KV."""
        self.groups[group] = OpenGroup(position, version, "")
        if agent:
            self.claim(group, agent, on or {}, tokens)

    def claim(self, group: int, agent: str, on: Mapping[str, int], tokens: float = 0.0) -> None:
        """`agent` holds the group, its samples are at `on` now."""
        self.groups[group].agent = agent
        self.agents[agent].groups.add(group)
        self._move(self.groups[group], on, tokens)

    def arrive(self, group: int, instance: str, tokens: float = 0.0) -> None:
        """One sample goes to `instance` and counts for `tokens` of KV there."""
        on = self.groups[group].on
        self._move(self.groups[group], {**on, instance: on.get(instance, 0) + 1}, tokens)

    def leave(self, group: int, instance: str, count: int) -> None:
        """`count` samples left `instance`, finished or handed back. Unknown groups and counts are ignored: they belong
        to a past that a death has closed already."""
        if open_group := self.groups.get(group):
            left = max(0, open_group.on.get(instance, 0) - count)
            self._move(open_group, {**open_group.on, instance: left})

    def close(self, group: int) -> str:
        """The group is in nobody's hands any more; returns the agent loop that held it."""
        open_group = self.groups.pop(group, None)
        if open_group is None:
            return ""
        self._move(open_group, {})
        if agent := self.agents.get(open_group.agent):
            agent.groups.discard(group)
            heappush(self._by_groups, (len(agent.groups), agent.name))
        return open_group.agent

    def add_agent(self, name: str) -> AgentView:
        """A new agent loop, or one that came back: it holds nothing but what it claims."""
        agent = self.agents[name] = AgentView(name)
        heappush(self._by_groups, (0, name))
        return agent

    def add_instance(self, view: InstanceView) -> None:
        """A new or restarted instance: nothing is there yet but what agent loops say is."""
        self.instances[view.name] = view
        view.in_flight = sum(g.on.get(view.name, 0) for g in self.groups.values())
        self.in_flight += view.in_flight
        self.fleet.add(view)

    def remove_instance(self, name: str) -> InstanceView:
        """It is gone: its samples are nowhere until they are routed again. Returns what was known of it."""
        for group in self.groups.values():
            if name in group.on:
                self._move(group, {i: n for i, n in group.on.items() if i != name})
        self.fleet.remove(self.instances[name])
        return self.instances.pop(name)

    def samples_at(self, name: str) -> dict[int, int]:
        """Samples at an instance, by group."""
        return {number: group.on[name] for number, group in self.groups.items() if name in group.on}

    def newest_versions(self) -> dict[str, int]:
        """Newest version of a group that has samples there, for each instance that has any: whoever is to take over all
        of its samples needs that version."""
        newest: dict[str, int] = {}
        for group in self.groups.values():
            for name in group.on:
                newest[name] = max(group.version, newest.get(name, group.version))
        return newest

    def held_by(self, agent: str) -> list[int]:
        return sorted(self.agents[agent].groups)

    def unclaimed(self) -> list[int]:
        return [number for number, group in self.groups.items() if not group.agent]

    def least_busy_agent(self) -> AgentView | None:
        """The one with the fewest groups; None if every agent loop leaves, or none is there. O(log n) a change."""
        heap = self._by_groups
        while heap:
            groups, name = heap[0]
            agent = self.agents.get(name)
            if agent is None or agent.leaving or groups > len(agent.groups):
                heappop(heap)  # gone, or an entry with fewer groups was pushed when they became fewer
            elif groups < len(agent.groups):
                heapreplace(heap, (len(agent.groups), name))
            else:
                return agent
        return None

    def _move(self, group: OpenGroup, on: Mapping[str, int], tokens: float = 0.0) -> None:
        """`tokens` is what each sample that arrives counts for; those that leave take their share of the rest along."""
        for name in {*group.on, *on}:
            before, after = group.on.get(name, 0), on.get(name, 0)
            held = group.tokens.pop(name, 0.0)
            now = held * after / before if after < before else held + tokens * (after - before)
            if now:
                group.tokens[name] = now
            if view := self.instances.get(name):
                view.in_flight += after - before
                self.in_flight += after - before
                if not view.in_flight:
                    view.stats.waiting = 0  # whoever waited there has left, whatever it reported last
                    view.fits = UNLIMITED
                if now != held:
                    view.placed_tokens = max(0.0, view.placed_tokens + now - held) if view.in_flight else 0.0
                self.changed.add(name)
        group.on = {name: count for name, count in on.items() if count}


def check_consistent(placement: Placement, open_groups: Iterable[int]) -> None:
    """An integrity check for tests and idle moments: counts equal what the groups say. Raises AssertionError."""
    assert set(placement.groups) == set(open_groups)
    for name, view in placement.instances.items():
        assert view.in_flight == sum(g.on.get(name, 0) for g in placement.groups.values()), name
    assert placement.in_flight == sum(view.in_flight for view in placement.instances.values())
    for name, agent in placement.agents.items():
        assert agent.groups == {n for n, g in placement.groups.items() if g.agent == name}, name
