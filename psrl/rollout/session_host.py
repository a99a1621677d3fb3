"""Plays the trajectories of session groups: one agent run a sample, its turns made wherever there is room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from psrl.agents.base import AgentPrompt, Ending, SampleAgent
from psrl.protocol import control as c
from psrl.protocol.generation import TURN, AbortRequest
from psrl.rollout.session_group import Captured, SessionGroup
from psrl.rollout.session_store import RunSessions
from psrl.rollout.trajectory import Trajectory
from psrl.sessions.session import Session
from psrl.sessions.turns import SessionOverError

log = logging.getLogger("psrl.agent_loop")

PLACE_KEPT_S = 1.0
"""How long the places that a group was assigned are kept for trajectories whose first turn has not begun."""


class Home(Protocol):
    """The agent loop, as far as its sessions need it."""

    def say(self, message: c.Message) -> None:
        """To the coordinator."""

    def ask(self, samples: list[tuple[int, int]], reason: str = "", instance: str = "") -> None:
        """For a place for these (group, sample)."""

    def request(self, work: SessionGroup, instance: str, samples: Sequence[int]) -> None:
        """Have these samples' turns made at `instance`."""

    def abort(self, instance: str, request: AbortRequest) -> None: ...

    def advance(self, work: SessionGroup) -> None:
        """A trajectory of this group is over."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


@dataclass(slots=True)
class _Playing:
    """One group's agents at work."""

    work: SessionGroup
    sessions: dict[int, Session] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class SessionHost:
    """Has `agent` play every sample; a session is in `store`, where an endpoint finds it, while its agent runs."""

    def __init__(self, home: Home, agent: SampleAgent, store: RunSessions) -> None:
        self.home, self.agent, self.store = home, agent, store
        self.playing: dict[int, _Playing] = {}

    # ---- a group -----------------------------------------------------------------------------------------------

    def begin(self, work: SessionGroup, prompt: AgentPrompt, instance: str) -> None:
        """Begin all trajectories of a group; their first turns are made at `instance` if they come soon."""
        playing = self.playing[work.assignment.group] = _Playing(work)
        for trajectory in work.trajectories:
            trajectory.keep_place(instance)
        playing.tasks = [self.home.spawn(self._play(playing, t, prompt)) for t in work.trajectories]
        playing.tasks.append(self.home.spawn(self._give_up_places(playing)))

    def captured(self, group: int, sample: int) -> Captured | None:
        """What was captured of a sample's session; None if it never had a turn."""
        playing = self.playing.get(group)
        capture = playing.sessions[sample].capture if playing is not None and sample in playing.sessions else None
        if capture is None or (branch := capture.trained_branch()) is None:
            return None
        return Captured(capture.arrays(branch), branch.token_ids, capture.num_turns)

    def end(self, group: int) -> None:
        """The group is complete, or given up: agents that still run are cancelled, and what was captured is forgotten."""
        if (playing := self.playing.pop(group, None)) is not None:
            self._cancel(playing)

    def stop(self, group: int) -> None:
        """The group is complete: agents that still run are cancelled; what was captured stays."""
        if (playing := self.playing.get(group)) is not None:
            self._cancel(playing)

    def _cancel(self, playing: _Playing) -> None:
        for task in playing.tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _play(self, playing: _Playing, trajectory: Trajectory, prompt: AgentPrompt) -> None:
        """One trajectory from its first turn to its reward. Whatever an agent raises ends this trajectory only."""
        work, sample = playing.work, trajectory.sample
        group = work.assignment.group
        session = playing.sessions[sample] = self.store.open(session_id(work, sample), trajectory)
        try:
            ending = await self.agent.run(session, prompt)
        except SessionOverError as error:
            if trajectory.finish:  # with its group
                return
            ending = Ending(failed=f"its session is over: {error}")  # a client ended it, or it was given up
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # by us: the group is complete, or given up
                raise
            ending = Ending(failed="its agent cancelled itself")
        except Exception as error:  # an agent is anybody's code
            log.exception("group %d sample %d: its agent failed", group, sample)
            ending = Ending(failed=f"{type(error).__name__}: {error}")
        finally:
            self.store.close(session)
        if not trajectory.finish:  # one that ended with its group is not asked what it is worth
            ending = judged(ending, spoke=session.capture.trained_branch() is not None, fault=session.fault)
        if ending.failed:
            log.warning("group %d sample %d is not trained: %s", group, sample, ending.failed)
        if kept := trajectory.give_up_place():
            self.home.say(c.SampleMoves(left=[(group, kept, 1)]))
        self.home.say(c.TurnsEnded(over=[(group, sample, trajectory.last_instance)]))
        work.finish(sample, ending)
        self.home.advance(work)

    async def _give_up_places(self, playing: _Playing) -> None:
        await asyncio.sleep(PLACE_KEPT_S)
        group = playing.work.assignment.group
        given_up = [(t.sample, kept) for t in playing.work.trajectories if not t.finish and (kept := t.give_up_place())]
        if given_up:
            self.home.say(c.SampleMoves(left=[(group, instance, 1) for _, instance in given_up]))
            self.home.say(c.TurnsEnded(away=[(group, sample, instance, 0) for sample, instance in given_up]))

    # ---- turns -------------------------------------------------------------------------------------------------

    def places(self, work: SessionGroup) -> GroupPlaces:
        return GroupPlaces(self.home, work)

    def tell_ended_turns(self, works: Sequence[SessionGroup]) -> None:
        """Say which turns have ended since this was last called for these groups."""
        away = [
            (work.assignment.group, sample, instance, tokens)
            for work in works
            for sample, instance, tokens in work.ended_turns
        ]
        for work in works:
            work.ended_turns.clear()
        self._tell_away(away)

    def tell_again(self) -> None:
        """Which trajectories are at their environment: a coordinator that was started again does not know."""
        self._tell_away(
            [
                (group, t.sample, t.last_instance, t.longest)
                for group, playing in self.playing.items()
                for t in playing.work.trajectories
                if t.away
            ]
        )

    def _tell_away(self, away: list[tuple[int, int, str, int]]) -> None:
        if away:
            self.home.say(c.TurnsEnded(away=away))


@dataclass(frozen=True, slots=True)
class GroupPlaces:
    """Where the turns of one group are made (psrl.rollout.trajectory.Places)."""

    home: Home
    work: SessionGroup

    def begin(self, trajectory: Trajectory) -> None:
        if trajectory.instance:
            self.home.request(self.work, trajectory.instance, [trajectory.sample])
        else:
            self.home.ask([(self.work.assignment.group, trajectory.sample)], TURN, trajectory.last_instance)

    def stop(self, trajectory: Trajectory, instance: str, sample: int) -> None:
        group = self.work.assignment.group
        self.home.abort(instance, AbortRequest(samples=((group, sample),)))
        self.home.say(c.SampleMoves(left=[(group, instance, 1)]))
        self.home.say(c.TurnsEnded(away=[(group, trajectory.sample, instance, trajectory.longest)]))


def judged(ending: Ending, *, spoke: bool, fault: str) -> Ending:
    """What an agent says of its trajectory, in the light of what its session knows. Many agents swallow a call that failed and return
    as if the model had said nothing, which is not for the policy to answer for: such a trajectory failed. `spoke`: the model had a
    turn; `fault` as Session.fault.

    >>> judged(Ending(), spoke=False, fault="").failed
    'it ended without a turn of the model and without a reward of its own'
    >>> judged(Ending(reward=0.0), spoke=True, fault="TurnTimeoutError: too slow").failed
    'its last turn failed, TurnTimeoutError: too slow'
    >>> judged(Ending(), spoke=True, fault="") == Ending(), judged(Ending(reward=0.5), spoke=False, fault="") == Ending(reward=0.5)
    (True, True)
    """
    if ending.failed:
        return ending
    if fault:
        return Ending(failed=f"its last turn failed, {fault}", metrics=ending.metrics)
    if not spoke and ending.reward is None:
        return Ending(
            failed="it ended without a turn of the model and without a reward of its own", metrics=ending.metrics
        )
    return ending


def session_id(work: SessionGroup, sample: int) -> str:
    """Unique in the run: a group that is tried again has another number, so nobody speaks into its successor."""
    return f"g{work.assignment.group}-{sample}"
