"""Whatever an agent does, its trajectory comes to an end, and its group with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from psrl.agents.base import Ending
from psrl.protocol import control as c
from psrl.protocol.control import Assignment
from psrl.protocol.generation import SamplingParams
from psrl.rollout.session_group import SessionGroup
from psrl.rollout.session_host import SessionHost
from psrl.rollout.trajectory import TokenLimits
from psrl.sessions.turns import SessionOverError

pytestmark = pytest.mark.unit


class Home:
    """Notes what is said; no turn is ever asked for here."""

    def __init__(self) -> None:
        self.said: list[c.Message] = []
        self.advanced = 0

    def say(self, message: c.Message) -> None:
        self.said.append(message)

    def advance(self, work: SessionGroup) -> None:
        self.advanced += 1

    def spawn(self, coroutine):
        return asyncio.get_running_loop().create_task(coroutine)


class Store:
    def open(self, session_id: str, maker: object) -> SimpleNamespace:
        return SimpleNamespace(id=session_id, capture=SimpleNamespace(trained_branch=lambda: None))

    def close(self, session: object) -> None:
        pass


class Agent:
    def __init__(self, behaviour: object) -> None:
        self.behaviour = behaviour

    async def run(self, session: object, prompt: object) -> Ending:
        if isinstance(self.behaviour, BaseException):
            raise self.behaviour
        assert isinstance(self.behaviour, Ending)
        return self.behaviour


@pytest.mark.parametrize(
    ("behaviour", "failed"),
    [
        (Ending(reward=1.0), ""),
        (RuntimeError("broken"), "RuntimeError: broken"),
        (SessionOverError("ended by a client"), "its session is over: ended by a client"),
        (asyncio.CancelledError(), "its agent cancelled itself"),
    ],
)
def test_every_trajectory_ends(behaviour: object, failed: str) -> None:
    async def test() -> None:
        home = Home()
        host = SessionHost(home, Agent(behaviour), Store())  # type: ignore[arg-type]
        assignment = Assignment(group=3, data_epoch=0, prompt=0, n=2, version=0, incarnation=0, instance="i0")
        group = SessionGroup(
            assignment,
            [1],
            SamplingParams(),
            TokenLimits(context=8, response=4),
            0,
            places=host.places,
            captured=lambda sample: host.captured(3, sample),
        )
        host.begin(group, SimpleNamespace(), "i0")  # type: ignore[arg-type]
        while not group.complete:
            await asyncio.sleep(0)
        assert home.advanced == 2 and [e.failed for e in group.endings.values()] == [failed] * 2
        left = [m.left for m in home.said if isinstance(m, c.SampleMoves)]
        assert left == [[(3, "i0", 1)]] * 2  # the places that were kept are free again
        host.end(3)

    asyncio.run(asyncio.wait_for(test(), 20))
