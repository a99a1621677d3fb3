"""Whatever an agent does, its trajectory comes to an end, and its group with it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from session_parts import END, THINKING, ScriptedMaker, chat_tokenizer, user

from psrl.agents.base import Ending
from psrl.protocol import control as c
from psrl.protocol.control import Assignment
from psrl.protocol.generation import SamplingParams
from psrl.rollout.finish import failure
from psrl.rollout.session_group import SessionGroup
from psrl.rollout.session_host import SessionHost
from psrl.rollout.trajectory import TokenLimits
from psrl.sessions.capture import SessionCapture
from psrl.sessions.session import ChatRequest, Session
from psrl.sessions.turns import SessionOverError, TrainingArrays

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
    """Sessions of which so much is known."""

    def __init__(self, spoke: bool = False, fault: str = "") -> None:
        branch = SimpleNamespace(token_ids=[4]) if spoke else None
        arrays = TrainingArrays([1], [4], [1], [-0.5], [])
        self.capture = SimpleNamespace(trained_branch=lambda: branch, arrays=lambda _: arrays, num_turns=int(spoke))
        self.fault = fault

    def open(self, session_id: str, maker: object) -> SimpleNamespace:
        return SimpleNamespace(id=session_id, capture=self.capture, fault=self.fault)

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


class Swallower:
    """Lets no error through, as many agents do."""

    async def run(self, session: Session, prompt: object) -> Ending:
        for text in ("a", "b"):
            with contextlib.suppress(Exception):
                await session.chat(ChatRequest(messages=[user(text)]))
        return Ending()


@pytest.mark.parametrize(
    ("turns", "failed"),
    [
        ([OSError("down"), OSError("down")], "its last turn failed, OSError: down"),
        ([[5, END], OSError("down")], "its last turn failed, OSError: down"),
        ([OSError("down"), [5, END]], ""),
    ],
)
def test_an_outage_that_an_agent_swallows_is_not_scored(tmp_path: Path, turns: list, failed: str) -> None:
    async def test() -> None:
        capture = SessionCapture(chat_tokenizer(tmp_path, THINKING))
        session = Session("s", capture, ScriptedMaker(turns))
        store = SimpleNamespace(open=lambda session_id, maker: session, close=lambda session: None)
        host = SessionHost(Home(), Swallower(), store)  # type: ignore[arg-type]
        assignment = Assignment(group=3, data_epoch=0, prompt=0, n=1, version=0, incarnation=0, instance="i0")
        limits = TokenLimits(context=8, response=4)
        places, captured = host.places, lambda sample: host.captured(3, sample)
        group = SessionGroup(assignment, [1], SamplingParams(), limits, 0, places=places, captured=captured)
        host.begin(group, SimpleNamespace(), "i0")  # type: ignore[arg-type]
        while not group.complete:
            await asyncio.sleep(0)
        verdict = group.verdict(0)
        assert group.endings[0].failed == failed
        assert (verdict is None) if not failed else (verdict is not None and verdict.reward is None)
        host.end(3)

    asyncio.run(asyncio.wait_for(test(), 20))


FAULT = "TurnTimeoutError: too slow"
NO_TURN = "it ended without a turn of the model and without a reward of its own"
SILENT, SPOKE = Store(), Store(spoke=True)


@pytest.mark.parametrize(
    ("behaviour", "store", "failed"),
    [
        (Ending(reward=1.0), SILENT, ""),
        (Ending(reward=0.0), SILENT, ""),
        (Ending(), SILENT, NO_TURN),
        (Ending(), SPOKE, ""),
        (Ending(), Store(fault=FAULT), f"its last turn failed, {FAULT}"),
        (Ending(), Store(spoke=True, fault=FAULT), f"its last turn failed, {FAULT}"),
        (Ending(reward=0.0), Store(spoke=True, fault=FAULT), f"its last turn failed, {FAULT}"),
        (Ending(failed="own reason"), Store(fault=FAULT), "own reason"),
        (RuntimeError("broken"), SPOKE, "RuntimeError: broken"),
        (SessionOverError("ended by a client"), SPOKE, "its session is over: ended by a client"),
        (asyncio.CancelledError(), SPOKE, "its agent cancelled itself"),
    ],
)
def test_every_trajectory_ends(behaviour: object, store: Store, failed: str) -> None:
    async def test() -> None:
        home = Home()
        host = SessionHost(home, Agent(behaviour), store)  # type: ignore[arg-type]
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
        assert group.failed == [failed] * 2 * bool(failed)
        verdicts = [group.verdict(sample) for sample in range(2)]
        if failed:
            assert [v.reward for v in verdicts if v is not None] == [None, None]  # never a 0
            said = failure(group, [v for v in verdicts if v is not None])
            assert said is not None and (said.reason, said.detail, said.retry) == ("error", failed, True)
        left = [m.left for m in home.said if isinstance(m, c.SampleMoves)]
        assert left == [[(3, "i0", 1)]] * 2  # the places that were kept are free again
        host.end(3)

    asyncio.run(asyncio.wait_for(test(), 20))
