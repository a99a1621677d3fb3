"""Sessions of no group: where their turns go, and what happens when an instance hands them back or is lost."""

from __future__ import annotations

import asyncio

import pytest

from psrl.protocol.generation import AbortRequest, GenerateRequest, SamplingParams, TokenChunk
from psrl.protocol.samples import VersionSpan
from psrl.rollout import guests as module
from psrl.rollout.guests import Guests
from psrl.rollout.trajectory import TokenLimits
from psrl.sessions.turns import SessionOverError, TurnRequest

pytestmark = pytest.mark.unit


class Fleet:
    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.sent: list[tuple[str, GenerateRequest | AbortRequest]] = []

    def send(self, instance: str, request: GenerateRequest | AbortRequest) -> bool:
        if instance not in self.names:
            return False
        self.sent.append((instance, request))
        return True

    def asked(self) -> list[str]:
        return [name for name, request in self.sent if isinstance(request, GenerateRequest)]


def make(*names: str) -> tuple[Guests, Fleet]:
    fleet = Fleet(*names)
    limits = TokenLimits(context=64, response=32)
    return Guests(SamplingParams(), limits, lambda: fleet.names, fleet.send), fleet


def answer(request: GenerateRequest, tokens: list[int], finish: str) -> TokenChunk:
    return TokenChunk(
        group=request.group,
        sample=request.samples[0].sample,
        token_ids=tokens,
        logprobs=[-1.0] * len(tokens),
        spans=[VersionSpan(0, len(tokens), 3)] if tokens else [],
        finish=finish,
    )


def last(fleet: Fleet) -> GenerateRequest:
    request = fleet.sent[-1][1]
    assert isinstance(request, GenerateRequest)
    return request


async def ask(guest, **options) -> asyncio.Task:
    task = asyncio.create_task(guest.turn(TurnRequest(prompt_ids=(1, 2), max_new_tokens=8, **options)))
    await asyncio.sleep(0)
    return task


def test_guests_spread_over_instances_and_are_sampled_as_they_ask() -> None:
    async def test() -> None:
        guests, fleet = make("a", "b")
        turns = [await ask(guests.arrive(seed), temperature=0.25) for seed in range(4)]
        assert sorted(fleet.asked()) == ["a", "a", "b", "b"]
        assert {request.group for _, request in fleet.sent} == {-1, -2, -3, -4}
        assert last(fleet).sampling.temperature == 0.25 and last(fleet).min_version == 0
        for instance, request in list(fleet.sent):
            guests.add(answer(request, [5], "stop"), instance)
        assert [turn.token_ids for turn in await asyncio.gather(*turns)] == [[5]] * 4

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("how", ["handed back", "lost"])
def test_a_turn_goes_on_elsewhere_with_what_it_has(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ELSEWHERE_S", 0.0)

    async def test() -> None:
        guests, fleet = make("a")
        turn = await ask(guests.arrive(1))
        request = last(fleet)
        if how == "lost":
            guests.add(answer(request, [5], ""), "a")
            fleet.names = ["b"]
            guests.lose("a")
        else:
            guests.add(answer(request, [5], "abort"), "a")
            fleet.names = ["b"]
            await asyncio.sleep(0.01)
        assert fleet.asked() == ["a", "b"] and last(fleet).samples[0].prefix_ids == (5,)
        guests.add(answer(last(fleet), [6], "stop"), "b")
        assert (await turn).token_ids == [5, 6]

    asyncio.run(asyncio.wait_for(test(), 20))


def test_without_an_instance_a_turn_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ELSEWHERE_S", 0.01)

    async def test() -> None:
        guests, fleet = make()
        turn = await ask(guests.arrive(1))
        fleet.names = ["a"]
        while not fleet.sent:
            await asyncio.sleep(0.01)
        guests.add(answer(last(fleet), [6], "stop"), "a")
        assert (await turn).token_ids == [6]

    asyncio.run(asyncio.wait_for(test(), 20))


def test_who_leaves_is_aborted_and_forgotten() -> None:
    async def test() -> None:
        guests, fleet = make("a")
        guest = guests.arrive(1)
        turn = await ask(guest)
        guests.leave(guest)
        with pytest.raises(SessionOverError):
            await turn
        assert fleet.sent[-1] == ("a", AbortRequest(groups=(-1,)))
        guests.leave(guest)  # once is enough
        guests.add(answer(fleet.sent[0][1], [5], "stop"), "a")

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_cancelled_turn_leaves_the_guest_ready_for_the_next() -> None:
    async def test() -> None:
        guests, fleet = make("a")
        guest = guests.arrive(1)
        turn = await ask(guest)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        aborted = fleet.sent[-1][1]
        assert isinstance(aborted, AbortRequest) and aborted.samples[0][0] == -1
        again = await ask(guest)
        guests.add(answer(last(fleet), [7], "stop"), "a")
        assert (await again).token_ids == [7]

    asyncio.run(asyncio.wait_for(test(), 20))
