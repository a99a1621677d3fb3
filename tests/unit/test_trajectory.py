"""Turns of a trajectory: what is asked of engines, what comes back, and what happens when places are lost in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from psrl.agents.base import Ending
from psrl.protocol.control import Assignment
from psrl.protocol.generation import SampleRequest, SamplingParams, TokenChunk
from psrl.protocol.samples import VersionSpan
from psrl.rollout.session_group import Captured, NoCommonPromptError, SessionGroup
from psrl.rollout.trajectory import TokenLimits, Trajectory, mixed_seed, turn_seed
from psrl.sessions.turns import SessionOverError, TrainingArrays, TurnRequest, TurnTokens

pytestmark = pytest.mark.unit

LIMITS = TokenLimits(context=100, response=40)


class Places:
    """Notes what trajectories ask for."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.stopped: list[tuple[int, str, int]] = []

    def begin(self, trajectory: Trajectory) -> None:
        self.begun.append(trajectory.sample)

    def stop(self, trajectory: Trajectory, instance: str, sample: int) -> None:
        self.stopped.append((trajectory.sample, instance, sample))


def make(n: int = 2, keep: int = 0, captured: dict[int, Captured] | None = None) -> tuple[SessionGroup, Places]:
    places = Places()
    assignment = Assignment(group=7, data_epoch=0, prompt=3, n=n, version=5, incarnation=1, instance="i0", keep=keep)
    group = SessionGroup(
        assignment,
        [1, 2],
        SamplingParams(stop_token_ids=(9,)),
        LIMITS,
        11,
        places=lambda _: places,
        captured=(captured or {}).get,
    )
    return group, places


def chunk(number: int, tokens: list[int], finish: str = "", start: int = 0, version: int = 5) -> TokenChunk:
    return TokenChunk(
        group=7,
        sample=number,
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        spans=[VersionSpan(start, start + len(tokens), version)],
        finish=finish,
    )


def played(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


async def begin(trajectory: Trajectory, prompt: tuple[int, ...], most: int = 20, **options) -> asyncio.Task[TurnTokens]:
    request = TurnRequest(prompt_ids=prompt, max_new_tokens=most, **options)
    task = asyncio.create_task(trajectory.turn(request))
    await asyncio.sleep(0)
    return task


def test_a_turn_is_a_request_of_its_own_and_goes_on_elsewhere_with_what_it_has() -> None:
    async def test() -> None:
        group, places = make()
        turn = await begin(group.trajectories[1], (1, 2, 3))
        assert places.begun == [1] and group.looking() == [1]
        [request] = group.requests("i0", [0, 1])
        assert (request.prompt_ids, request.min_version, request.samples[0].max_new_tokens) == ((1, 2, 3), 5, 20)
        number = request.samples[0].sample
        assert group.where() == {"i0": 1} and group.looking() == []
        assert group.requests("i1", [1]) == []  # two answers crossed
        assert group.add(chunk(number, [4, 5]), "i0") == (False, False)
        assert group.add(chunk(number, [6], "abort", start=2), "i0") == (True, True)
        assert group.looking() == [1] and tuple(group.context(1)) == (1, 2, 3, 4, 5, 6)
        [more] = group.requests("i1", [1])
        assert (more.samples[0].prefix_ids, more.samples[0].max_new_tokens) == ((4, 5, 6), 17)
        assert group.add(chunk(number, [8]), "i0") == (False, False)  # from where it is no longer
        assert group.add(chunk(number, [9], "stop", version=6), "i1") == (True, False)
        made = await turn
        assert (made.token_ids, made.finish) == ([4, 5, 6, 9], "stop")
        assert made.spans == [VersionSpan(0, 3, 5), VersionSpan(3, 4, 6)]
        assert group.ended_turns == [(1, "i1", 7)] and group.where() == {} and group.looking() == []
        assert not group.complete

    played(test)


def test_the_next_turn_says_where_the_last_one_was_made() -> None:
    async def test() -> None:
        group, _ = make()
        trajectory = group.trajectories[0]

        async def turn(number: int, instance: str) -> str:
            task = await begin(trajectory, tuple(range(number)), most=5)
            [request] = group.requests(instance, [0])
            assert group.add(chunk(request.samples[0].sample, [4], "stop"), instance) == (True, False)
            await task
            return request.samples[0].source

        assert [await turn(2, "i0"), await turn(3, "i1"), await turn(4, "i1"), await turn(5, "i0")] == [
            "",
            "i0",
            "",
            "i1",
        ]
        assert group.lost("i0") == []
        assert await turn(6, "i1") == ""

    played(test)


def test_parts_of_a_turn_are_told_as_they_come() -> None:
    async def test() -> None:
        group, _ = make()
        heard: list[TurnTokens] = []
        request = TurnRequest(prompt_ids=(1,), max_new_tokens=9)
        turn = asyncio.create_task(group.trajectories[0].turn(request, heard.append))
        await asyncio.sleep(0)
        number = group.requests("i0", [0])[0].samples[0].sample
        group.add(chunk(number, [4, 5]), "i0")
        group.add(chunk(number, [6], "abort", start=2), "i0")
        group.requests("i1", [0])
        group.add(chunk(number, [7, 9], "stop", version=6), "i1")
        await turn
        assert [part.token_ids for part in heard] == [[4, 5], [6], [7, 9]]
        assert heard[2].spans == [VersionSpan(3, 5, 6)]  # counted from the first token of the turn

    played(test)


def test_what_is_left_of_a_cancelled_turn_does_not_reach_the_next_one() -> None:
    async def test() -> None:
        group, places = make()
        trajectory = group.trajectories[0]
        first = await begin(trajectory, (1, 2))
        number = group.requests("i0", [0])[0].samples[0].sample
        group.add(chunk(number, [4]), "i0")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert places.stopped == [(0, "i0", number)] and group.where() == {}
        second = await begin(trajectory, (1, 2))
        following = group.requests("i0", [0])[0].samples[0]
        assert following.sample != number and following.sample % 2 == 0 and following.prefix_ids == ()
        assert group.add(chunk(number, [5], "abort"), "i0") == (False, False)
        group.add(chunk(following.sample, [9], "stop"), "i0")
        assert (await second).token_ids == [9]
        assert trajectory.token_ids == [9]

    played(test)


def test_a_cancelled_turn_that_has_no_place_yet_stops_nothing() -> None:
    async def test() -> None:
        group, places = make()
        turn = await begin(group.trajectories[0], (1,))
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert places.stopped == [] and group.requests("i0", [0]) == []

    played(test)


def test_a_place_is_kept_for_the_first_turn_until_it_is_given_up() -> None:
    async def test() -> None:
        group, _ = make()
        early, late = group.trajectories
        for trajectory in (early, late):
            trajectory.keep_place("i0")
        assert group.where() == {"i0": 2} and group.looking() == []
        await begin(early, (1,))
        assert group.looking() == [] and len(group.requests("i0", [0])) == 1
        assert early.give_up_place() == "" and late.give_up_place() == "i0"
        assert group.where() == {"i0": 1}
        assert group.lost("i0") == [0] and group.looking() == [0]

    played(test)


def test_room_is_the_response_budget_behind_the_first_prompt_within_the_context() -> None:
    async def test() -> None:
        group, _ = make()
        trajectory = group.trajectories[0]
        assert (trajectory.room(10), trajectory.room(90), trajectory.room(100)) == (40, 10, 0)
        turn = await begin(trajectory, tuple(range(10)), most=1000)
        item = group.requests("i0", [0])[0].samples[0]
        assert item.max_new_tokens == 40
        group.add(chunk(item.sample, [4] * 15, "stop"), "i0")
        await turn
        assert (trajectory.room(25), trajectory.room(30), trajectory.room(50)) == (25, 20, 0)

    played(test)


async def asked_of_engine(group: SessionGroup, sample: int, **options) -> SampleRequest:
    """Of a turn that is begun and then given up."""
    turn = await begin(group.trajectories[sample], (1, 2), **options)
    [request] = group.requests("i0", [sample])
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    return request.samples[0]


@pytest.mark.parametrize("seed", [42, 0, -(2**63)])
def test_samples_that_train_differ_though_their_agents_ask_for_the_same_seed(seed: int) -> None:
    async def test() -> None:
        group, _ = make(n=8)
        asked = [await asked_of_engine(group, i, seed=seed) for i in range(8)]
        assert len({item.seed for item in asked}) == 8 and all(0 <= item.seed < 2**62 for item in asked)
        assert all(item.exact for item in asked)  # who names a seed counts on its draws
        assert not (await asked_of_engine(group, 0)).exact

    played(test)


def test_a_turn_that_is_made_again_draws_the_same_numbers_and_no_other_does() -> None:
    async def test() -> None:
        first, same = make()[0], make()[0]  # the same group in another process
        once = await asked_of_engine(first, 1, seed=42)
        assert (await asked_of_engine(first, 1, seed=42)).seed == once.seed
        assert (await asked_of_engine(same, 1, seed=42)).seed == once.seed
        others = [{"seed": 43}, {}, {"num_before": 1}, {"seed": 42, "num_before": 1}, {"seed": 42, "num_before": 2}]
        seeds = [(await asked_of_engine(first, 1, **options)).seed for options in others]
        assert len({once.seed, *seeds}) == 6

    played(test)


def test_what_does_not_train_is_drawn_by_exactly_the_seed_that_was_asked_for() -> None:
    async def test() -> None:
        group, _ = make()
        for trajectory in group.trajectories:
            trajectory.trains = False
        asked = [await asked_of_engine(group, i, seed=42, num_before=i) for i in range(2)]
        assert [(item.seed, item.exact) for item in asked] == [(42, True)] * 2

    played(test)


def test_no_two_turns_draw_the_same_numbers() -> None:
    seeds = [turn_seed(seed, turn) for seed in (0, 1, 2**62 - 1) for turn in range(50)]
    seeds += [mixed_seed(seed, asked) for seed in seeds[:100] for asked in (1, 2, 42, 1234, 2**63 - 1)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**62 for seed in seeds)


def test_a_trajectory_that_has_ended_takes_no_turn_and_frees_who_waits() -> None:
    async def test() -> None:
        group, _ = make()
        turn = await begin(group.trajectories[0], (1,))
        group.requests("i0", [0])
        assert group.end_rest("redundant") == {"i0": 1}
        with pytest.raises(SessionOverError):
            await turn
        with pytest.raises(SessionOverError):
            await group.trajectories[1].turn(TurnRequest(prompt_ids=(1,), max_new_tokens=1))

    played(test)


def arrays(prompt: list[int], response: list[int], mask: list[int]) -> Captured:
    return Captured(TrainingArrays(prompt, response, mask, [-0.5 * m for m in mask], []), response, 2)


def test_sessions_with_different_prompts_are_sealed_with_what_they_begin_with_alike() -> None:
    captured = {0: arrays([1, 2, 3], [4, 5], [1, 0]), 1: arrays([1, 2, 7, 8], [6], [1])}
    group, _ = make(captured=captured)
    group.finish(0, Ending(reward=1.0, metrics={"hints": 2.0}))
    group.finish(1, Ending(reward=0.5))
    assert group.complete and group.kept() == [0, 1] and group.trajectories[0].token_ids == [4]
    scores = [group.verdict(i) for i in (0, 1)]
    assert [s.reward for s in scores if s is not None] == [1.0, 0.5]
    assert group.trainable_tokens(scores) == [5, 5]
    sealed = group.group(scores)
    assert sealed.prompt_ids == b"\x01\0\0\0\x02\0\0\0"
    assert [s.mask for s in sealed.samples] == [b"\0\1\0", b"\0\0\1"]
    assert sealed.samples[0].metrics == {"num_turns": 2.0, "hints": 2.0}


@pytest.mark.parametrize("reward", [None, 0.0])
def test_a_failed_trajectory_is_never_trained_whatever_its_reward(reward: float | None) -> None:
    captured = {0: arrays([1], [4], [1]), 1: arrays([1], [4], [1])}
    group, _ = make(captured=captured)
    group.finish(0, Ending(reward=reward, failed="the environment did not answer"))
    group.finish(1, Ending(reward=None))
    failed = group.verdict(0)
    assert failed is not None and failed.reward is None and group.verdict(1) is None
    assert group.failed == ["the environment did not answer"]
    assert group.trainable_tokens([failed, failed]) == [0, 0]


def test_a_trajectory_that_was_cut_short_has_no_reward() -> None:
    group, _ = make(captured={0: arrays([1], [4], [1]), 1: arrays([1], [4], [1])})
    group.finish(0, Ending(reward=1.0))
    group.end_rest("truncated")
    assert group.kept() == [0, 1]
    verdict = group.verdict(1)
    assert verdict is not None and verdict.reward is None


def test_sessions_without_a_common_first_token_are_refused() -> None:
    group, _ = make(captured={0: arrays([1], [4], [1]), 1: arrays([2], [4], [1])})
    group.finish(0, Ending(reward=1.0))
    group.finish(1, Ending(reward=1.0))
    with pytest.raises(NoCommonPromptError, match="group 7"):
        group.trainable_tokens([group.verdict(0), group.verdict(1)])
