"""Sessions that belong to no group: anybody with the run's token talks to the policy as it is at the moment. Nothing trains.

They are no work of the coordinator's, which counts what trains: a guest's turn goes to the instance that has the fewest of this
agent loop's guests, and on to another one when it is handed back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from psrl.protocol.generation import AbortRequest, GenerateRequest, SamplingParams, TokenChunk
from psrl.rollout.trajectory import TokenLimits, Trajectory

ELSEWHERE_S = 0.2
"""Before a turn that was handed back, or found no instance, is tried again."""


class Guests:
    """Trajectories of groups that do not exist: -1, -2 and so on (psrl.rollout.trajectory.Places). `instances()` are those
    that are there now; `send(instance, request)` is False if it is gone."""

    def __init__(
        self,
        sampling: SamplingParams,
        limits: TokenLimits,
        instances: Callable[[], Sequence[str]],
        send: Callable[[str, GenerateRequest | AbortRequest], bool],
    ) -> None:
        self.sampling, self.limits = sampling, limits
        self.instances, self.send = instances, send
        self.incarnation = 0
        self._numbers = itertools.count(1)
        self._here: dict[int, Trajectory] = {}
        self._group_of: dict[int, int] = {}
        """By id() of the trajectory."""
        self._at: Counter[str] = Counter()

    def arrive(self, seed: int) -> Trajectory:
        group = -next(self._numbers)
        trajectory = self._here[group] = Trajectory(0, seed, 1, self.limits, self, trains=False)
        self._group_of[id(trajectory)] = group
        return trajectory

    def leave(self, trajectory: Trajectory) -> None:
        """It takes no further turn."""
        if (group := self._group_of.pop(id(trajectory), None)) is not None:
            del self._here[group]
            if at := trajectory.instance:
                self._at[at] -= 1
                self.send(at, AbortRequest(groups=(group,)))
            trajectory.end("closed")

    # ---- turns -------------------------------------------------------------------------------------------------

    def begin(self, trajectory: Trajectory) -> None:
        group = self._group_of.get(id(trajectory))
        if group is None or not trajectory.looking:
            return
        for instance in sorted(self.instances(), key=lambda name: (self._at[name], name)):
            request = trajectory.next_request(
                instance, group=group, version=0, incarnation=self.incarnation, sampling=self.sampling
            )
            if request is None:
                return
            if self.send(instance, request):
                self._at[instance] += 1
                return
            trajectory.lost()
        asyncio.get_running_loop().call_later(ELSEWHERE_S, self.begin, trajectory)

    def stop(self, trajectory: Trajectory, instance: str, sample: int) -> None:
        self._at[instance] -= 1
        self.send(instance, AbortRequest(samples=((self._group_of[id(trajectory)], sample),)))

    def add(self, chunk: TokenChunk, instance: str) -> None:
        """Tokens of a guest's turn."""
        if (trajectory := self._here.get(chunk.group)) is None:
            return
        left, route = trajectory.add(chunk, instance)
        if left:
            self._at[instance] -= 1
            if route:
                asyncio.get_running_loop().call_later(ELSEWHERE_S, self.begin, trajectory)

    def lose(self, instance: str) -> None:
        """An instance is gone: turns that were made there go on elsewhere."""
        self._at.pop(instance, None)
        for trajectory in self._here.values():
            trajectory.forget(instance)
            if trajectory.instance == instance:
                trajectory.lost()
                self.begin(trajectory)
