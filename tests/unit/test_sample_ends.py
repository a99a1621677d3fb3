"""What becomes of a group of which not every sample is kept, and of those without signal."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from psrl.protocol.control import Assignment
from psrl.protocol.generation import FINISH_REDUNDANT, FINISH_TRUNCATED, SamplingParams, TokenChunk
from psrl.protocol.samples import VersionSpan
from psrl.rollout.finish import failure
from psrl.rollout.group_filters import MissingMetricError, make_filter, without_signal
from psrl.rollout.group_work import GroupWork
from psrl.rollout.sample_ends import CONSUMED, REDUNDANT, RETURNED, group_ends
from psrl.rollout.scoring import ScoreResult

pytestmark = pytest.mark.unit
SIGNAL = make_filter("dynamic_sampling_filter", "seq_reward")


def work(n: int = 4, keep: int = 2, **more) -> GroupWork:
    assignment = Assignment(
        group=5, data_epoch=0, prompt=9, n=n, version=1, incarnation=0, instance="r0", attempt=0, keep=keep
    )
    group = GroupWork(assignment, [1, 2, 3], SamplingParams(), 8, 7, **more)
    group.request("r0", range(n))
    return group


def add(group: GroupWork, sample: int, tokens: int, finish: str = "", version: int = 1, start: int = 0) -> None:
    spans = [VersionSpan(start, start + tokens, version)] if tokens else []
    chunk = TokenChunk(
        group=5, sample=sample, token_ids=[6] * tokens, logprobs=[-0.5] * tokens, spans=spans, finish=finish
    )
    group.add(chunk, group.samples[sample].instance)


def ok(*rewards: float | None) -> list[ScoreResult]:
    return [ScoreResult(r, "ok" if r is not None else "invalid") for r in rewards]


def test_the_first_that_finish_are_kept_in_their_own_order() -> None:
    group = work()
    add(group, 0, 5)
    add(group, 3, 2, "stop")
    assert not group.complete
    add(group, 1, 3, "stop")
    assert group.complete and group.kept() == [1, 3]
    assert group.end_rest(FINISH_REDUNDANT) == {"r0": 2} and group.unfinished == 0
    assert group.where() == {} and group.looking() == []
    add(group, 0, 2, "stop")  # on its way when it was aborted
    assert group.kept() == [1, 3] and len(group.samples[0].token_ids) == 5
    sealed = group.group(ok(1.0, 0.0))
    assert [len(s.response_ids) // 4 for s in sealed.samples] == [3, 2]
    assert group_ends(group, CONSUMED) == [("redundant", 5), ("consumed", 3), ("redundant", 0), ("consumed", 2)]


def test_an_empty_answer_is_kept_only_for_want_of_others() -> None:
    group = work(n=3)
    add(group, 0, 0, "length")
    add(group, 1, 2, "stop")
    assert not group.complete
    add(group, 2, 4, "stop")
    assert group.complete and group.kept() == [1, 2]
    assert group_ends(group, CONSUMED)[0] == ("unused", 0)
    group = work(n=2)
    add(group, 0, 0, "length")
    add(group, 1, 2, "stop")
    assert group.complete and group.kept() == [0, 1]


def test_truncation_keeps_what_finished_and_then_the_longest() -> None:
    group = work()
    add(group, 1, 1)
    add(group, 2, 6)
    add(group, 3, 2, "stop")
    assert group.end_rest(FINISH_TRUNCATED) == {"r0": 3} and group.complete
    assert group.kept() == [2, 3]
    sealed = group.group(ok(1.0, 0.0))
    assert [s.finish for s in sealed.samples] == ["truncated", "stop"]
    assert group_ends(group, CONSUMED) == [("truncated", 0), ("truncated", 1), ("truncated", 6), ("consumed", 2)]
    assert failure(group, ok(1.0, 0.0)) is None


def test_a_truncation_that_leaves_nothing_to_compare_is_dropped() -> None:
    group = work(n=2)
    add(group, 1, 3)
    group.end_rest(FINISH_TRUNCATED)
    failed = failure(group, ok(1.0, 0.0))
    assert failed is not None and (failed.reason, failed.retry) == ("empty_truncation", False)
    assert "1 of 2 samples" in failed.detail


def test_a_group_that_was_taken_away_counts_what_it_had() -> None:
    group = work(n=3)
    add(group, 0, 4)
    add(group, 2, 1, "stop")
    assert group_ends(group, REDUNDANT) == [("redundant", 4), ("redundant", 0), ("unused", 1)]
    assert group_ends(group, RETURNED) == [("returned", 4), ("returned", 0), ("unused", 1)]


def test_an_interrupted_sample_is_one_answer_scored_once() -> None:
    """Tokens [5, 6] and an abort at version 1, then [7, EOS] at version 2: four tokens, four log-probs, start version 1."""
    group = work(n=3, keep=1)
    add(group, 0, 2, "abort")
    assert not group.complete and group.samples[0].finish == ""
    group.request("r1", [0])
    add(group, 0, 2, "stop", version=2)
    assert group.complete and group.kept() == [0]
    (sample,) = group.group(ok(1.0)).samples
    assert (sample.finish, len(sample.response_ids), len(sample.logprobs)) == ("stop", 16, 16)
    assert sample.spans == [VersionSpan(0, 2, 1), VersionSpan(2, 4, 2)] and sample.mask == b""


@pytest.mark.parametrize(
    ("as_prompt", "mask", "tokens"), [(True, [0, 0, 1, 1], [7, 0, 5]), (False, [1, 1, 1, 1], [7, 5, 5])]
)
def test_what_trains_of_an_interrupted_sample(as_prompt: bool, mask: list[int], tokens: list[int]) -> None:
    group = work(n=3, keep=3, interrupt_as_prompt=as_prompt)
    add(group, 0, 2, "abort")
    group.request("r1", [0])
    add(group, 0, 2, "stop", version=2)
    add(group, 2, 2, "stop")
    add(group, 1, 2, "abort")  # interrupted, and cut short before newer weights made anything
    group.end_rest(FINISH_TRUNCATED)
    scores = ok(1.0, 0.0, 0.5)
    samples = group.group(scores).samples
    assert list(samples[0].mask or b"\1\1\1\1") == mask and samples[2].mask == b""
    assert group.trainable_tokens(scores) == tokens


def test_being_moved_between_equal_weights_is_no_interruption() -> None:
    group = work(n=1, keep=1, interrupt_as_prompt=True)
    add(group, 0, 2, "migrated")
    group.request("r1", [0])
    add(group, 0, 2, "refused")
    group.request("r2", [0])
    add(group, 0, 1, "stop")
    assert group.samples[0].newest_start == 0 and group.group(ok(1.0)).samples[0].mask == b""


# ---- filters -------------------------------------------------------------------------------------------------


@dataclass
class Score:
    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("metric", "scores", "dropped"),
    [
        ("seq_reward", [Score(1.0), Score(1.0)], "seq_reward is 1 for all 2 samples"),
        ("seq_reward", [Score(0.0), Score(1.0)], None),
        ("score", [Score(0.5), Score(0.5), Score(None)], "score is 0.5 for all 2 samples"),
        ("acc", [Score(0.1, {"acc": 1.0}), Score(0.9, {"acc": 1.0})], "acc is 1 for all 2 samples"),
        ("acc", [Score(0.5, {"acc": 1.0}), Score(0.5, {"acc": 0.0})], None),
    ],
)
def test_groups_without_signal(metric: str, scores: list[Score], dropped: str | None) -> None:
    assert without_signal(metric, scores) == dropped


def test_a_metric_that_the_reward_does_not_return_is_named() -> None:
    with pytest.raises(MissingMetricError, match=r"filter_groups.metric=acc .*\(f1, len\).*seq_reward"):
        without_signal("acc", [Score(1.0, {"len": 3.0, "f1": 0.0})])


def test_a_filtered_group_is_not_tried_again_and_a_failed_score_is() -> None:
    group = work(n=2)
    add(group, 0, 2, "stop")
    add(group, 1, 2, "stop")
    filtered = failure(group, ok(1.0, 1.0), SIGNAL)
    assert filtered is not None and (filtered.reason, filtered.retry) == ("filtered", False)
    assert failure(group, ok(1.0, 1.0)) is None and failure(group, ok(1.0, 0.0), SIGNAL) is None
    failed = failure(group, [*ok(1.0), ScoreResult(None, "timeout", "late")], SIGNAL)
    assert failed is not None and (failed.reason, failed.retry) == ("timeout", True)
    invalid = failure(group, ok(1.0, None), SIGNAL)
    assert invalid is not None and invalid.reason == "invalid_rewards"


def test_reward_figures_are_sealed_with_the_sample() -> None:
    group = work(n=2)
    add(group, 0, 2, "stop")
    add(group, 1, 2, "stop")
    sealed = group.group([ScoreResult(1.0, "ok", None, {"acc": 1.0}), ScoreResult(0.0, "ok")])
    assert [s.metrics for s in sealed.samples] == [{"acc": 1.0}, {}]
    assert np.frombuffer(sealed.samples[0].response_ids, dtype="<i4").tolist() == [6, 6]
