"""A group across instances, and the joining of streamed chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from psrl.protocol.control import Assignment
from psrl.protocol.generation import SamplingParams, TokenChunk
from psrl.protocol.samples import VersionSpan
from psrl.rollout.group_work import GroupWork, sample_seed
from psrl.rollout.stream import join_chunks

pytestmark = pytest.mark.unit


@dataclass
class Score:
    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)


def work(n: int = 2, max_response: int = 4) -> GroupWork:
    return GroupWork(assignment(n=n), [1, 2, 3], SamplingParams(), max_response, seed=7)


def assignment(**changes) -> Assignment:
    values = {"group": 5, "data_epoch": 0, "prompt": 9, "n": 2, "version": 1, "incarnation": 0, "instance": "r0"}
    return Assignment(**{**values, **changes})


def chunk(sample: int, tokens: list[int], finish: str = "", version: int = 1, start: int = 0) -> TokenChunk:
    spans = [VersionSpan(start, start + len(tokens), version)] if tokens else []
    return TokenChunk(
        group=5, sample=sample, token_ids=tokens, logprobs=[-0.5] * len(tokens), spans=spans, finish=finish
    )


def test_a_group_that_is_interrupted_and_continued_elsewhere_is_sealed_whole() -> None:
    group = work()
    assert [s.max_new_tokens for s in group.request("r0", [0, 1]).samples] == [4, 4]
    assert group.where() == {"r0": 2}
    assert group.add(chunk(0, [7, 8], "stop"), "r0") == (True, False)
    assert group.add(chunk(1, [6], "abort"), "r0") == (True, True)
    assert group.looking() == [1] and group.unfinished == 1
    request = group.request("r1", [1])
    assert request.samples[0].prefix_ids == (6,) and request.samples[0].max_new_tokens == 3
    assert group.add(chunk(1, [5, 4, 3], "length", version=2), "r1") == (True, False)
    assert group.unfinished == 0
    sealed = group.group([Score(1.0), Score(0.0)])
    assert np.frombuffer(sealed.samples[1].response_ids, dtype="<i4").tolist() == [6, 5, 4, 3]
    assert len(sealed.samples[1].logprobs) == 4 * 4
    assert sealed.samples[1].spans == [VersionSpan(0, 1, 1), VersionSpan(1, 4, 2)]
    assert sealed.version == 1 and sealed.prompt == 9


def test_chunks_of_an_instance_that_a_sample_has_left_are_ignored() -> None:
    group = work()
    group.request("r0", [0, 1])
    assert group.lost("r0") == [0, 1]
    group.request("r1", [0, 1])
    assert group.add(chunk(0, [9], "stop"), "r0") == (False, False)
    assert group.samples[0].token_ids == []


def test_a_sample_that_is_being_made_is_not_asked_for_elsewhere() -> None:
    group = work(n=2)
    group.request("r0", [0])
    request = group.request("r1", [0, 1])
    assert request is not None and [s.sample for s in request.samples] == [1]
    assert group.request("r1", [0]) is None and group.where() == {"r0": 1, "r1": 1}


def test_an_abort_at_the_end_of_the_budget_is_the_length_limit() -> None:
    group = work(n=1)
    group.request("r0", [0])
    assert group.add(chunk(0, [1, 2, 3, 4], "abort"), "r0") == (True, False)
    assert group.samples[0].finish == "length" and group.unfinished == 0


@pytest.mark.parametrize(("rewards", "tokens"), [([1.0, 0.5], [5, 4]), ([None, 0.5], [0, 4]), ([1.0, None], [5, 0])])
def test_samples_without_a_reward_count_no_trainable_tokens(rewards: list[float | None], tokens: list[int]) -> None:
    group = work()
    group.request("r0", [0, 1])
    group.add(chunk(0, [7, 8], "stop"), "r0")
    group.add(chunk(1, [6], "stop"), "r0")
    assert group.trainable_tokens([Score(r) for r in rewards]) == tokens


def test_an_empty_response_is_not_trained() -> None:
    group = work(n=1)
    group.request("r0", [0])
    group.add(chunk(0, [], "length"), "r0")
    assert group.trainable_tokens([Score(1.0)]) == [0]


def test_seeds_follow_the_prompt_not_the_group() -> None:
    seeds = {
        sample_seed(0, assignment(prompt=p, data_epoch=e, n=4), s)
        for p in range(50)
        for e in range(3)
        for s in range(4)
    }
    assert len(seeds) == 600
    assert sample_seed(0, assignment(group=1), 0) == sample_seed(0, assignment(group=2), 0)
    assert sample_seed(0, assignment(), 0) != sample_seed(1, assignment(), 0)


def test_streamed_chunks_join_per_sample_and_a_finished_one_ends_the_row() -> None:
    chunks = [chunk(0, [1]), chunk(1, [9]), chunk(0, [2], "abort", start=1), chunk(0, [3], "stop")]
    joined = join_chunks(chunks)
    assert [(c.sample, c.token_ids, c.finish) for c in joined] == [(0, [1, 2], "abort"), (1, [9], ""), (0, [3], "stop")]
    assert joined[0].spans == [VersionSpan(0, 1, 1), VersionSpan(1, 2, 1)]


def test_the_greedy_sample_is_asked_for_as_such_sealed_and_never_trained() -> None:
    group = GroupWork(assignment(n=3), [1, 2, 3], SamplingParams(), 4, seed=7, greedy=1)
    assert [s.greedy for s in group.request("r0", [0, 1, 2]).samples] == [False, False, True]
    for sample in range(3):
        group.add(chunk(sample, [7], "abort" if sample == 2 else "stop"), "r0")
    assert [s.greedy for s in group.request("r1", [2]).samples] == [True]  # also when it goes on elsewhere
    group.add(chunk(2, [8], "stop", start=1), "r1")
    scores = [Score(1.0), Score(0.0), Score(0.5)]
    assert group.trainable_tokens(scores) == [4, 4, 0]
    assert [(s.greedy, s.reward) for s in group.group(scores).samples] == [(False, 1.0), (False, 0.0), (True, 0.5)]


def test_nothing_is_fetched_from_an_instance_that_is_gone() -> None:
    group = work()
    for sample, instance in ((0, "r0"), (1, "r1")):
        group.request(instance, [sample])
        group.add(chunk(sample, [4], "migrated"), instance)
    assert group.lost("r0") == []
    assert [sample.source for sample in group.request("r2", [0, 1]).samples] == ["", "r1"]
