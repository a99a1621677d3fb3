"""Partial rollout: budgets, log-probs and finish reasons across interruptions."""

import pytest

from psrl.protocol.generation import TokenChunk
from psrl.protocol.samples import VersionSpan
from psrl.rollout.partial import PartialSample

pytestmark = pytest.mark.unit

EOS = 9


def test_an_aborted_sample_is_continued_and_keeps_both_parts() -> None:
    sample = PartialSample(sample=0, seed=1, max_response=8)
    sample.next_request("r0")
    ended = sample.add(
        TokenChunk(
            group=1, sample=0, token_ids=[5, 6], logprobs=[-0.5, -0.6], spans=[VersionSpan(0, 2, 1)], finish="abort"
        )
    )
    assert ended and sample.finish == "" and sample.instance == ""
    request = sample.next_request("r1")
    assert request is not None and request.prefix_ids == (5, 6) and request.max_new_tokens == 6
    sample.add(
        TokenChunk(
            group=1, sample=0, token_ids=[7, EOS], logprobs=[-0.7, -0.9], spans=[VersionSpan(0, 2, 2)], finish="stop"
        )
    )
    assert sample.token_ids == [5, 6, 7, EOS]
    assert sample.logprobs == [-0.5, -0.6, -0.7, -0.9]
    assert sample.spans == [VersionSpan(0, 2, 1), VersionSpan(2, 4, 2)]
    assert sample.finish == "stop"


@pytest.mark.parametrize(("generated", "asked"), [(0, 24576), (18202, 6374), (24575, 1)])
def test_a_continuation_asks_for_the_remaining_budget(generated: int, asked: int) -> None:
    sample = PartialSample(sample=0, seed=1, max_response=24576, token_ids=[1] * generated, logprobs=[0.0] * generated)
    request = sample.next_request("r0")
    assert request is not None and request.max_new_tokens == asked and len(request.prefix_ids) == generated


def test_a_used_up_budget_needs_no_request() -> None:
    sample = PartialSample(sample=0, seed=1, max_response=4, token_ids=[1] * 4, logprobs=[0.0] * 4)
    assert sample.next_request("r0") is None
    assert sample.finish == "length"


def test_spans_of_one_version_join_across_chunks() -> None:
    sample = PartialSample(sample=0, seed=1, max_response=8)
    sample.next_request("r0")
    sample.add(TokenChunk(group=1, sample=0, token_ids=[1], logprobs=[0.0], spans=[VersionSpan(0, 1, 3)]))
    sample.add(TokenChunk(group=1, sample=0, token_ids=[2], logprobs=[0.0], spans=[VersionSpan(1, 2, 3)]))
    assert sample.spans == [VersionSpan(0, 2, 3)]


def test_a_lost_instance_keeps_what_was_streamed() -> None:
    sample = PartialSample(sample=0, seed=1, max_response=8)
    sample.next_request("r0")
    sample.add(TokenChunk(group=1, sample=0, token_ids=[4], logprobs=[-1.0], spans=[VersionSpan(0, 1, 0)]))
    sample.lost()
    request = sample.next_request("r1")
    assert request is not None and request.prefix_ids == (4,) and request.max_new_tokens == 7


def test_tokens_without_log_probs_are_an_error() -> None:
    sample = PartialSample(sample=0, seed=1, max_response=8)
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        sample.add(TokenChunk(group=1, sample=0, token_ids=[1, 2], logprobs=[0.0], spans=[], finish="stop"))


def test_a_request_says_where_the_last_tokens_were_made() -> None:
    sample = PartialSample(sample=0, seed=1, max_response=8)

    def sent(instance: str) -> str:
        request = sample.next_request(instance)
        assert request is not None
        return request.source

    def handed_back(finish: str, *token_ids: int) -> None:
        spans = [VersionSpan(0, len(token_ids), 0)] if token_ids else []
        logprobs = [0.0] * len(token_ids)
        sample.add(
            TokenChunk(group=1, sample=0, token_ids=list(token_ids), logprobs=logprobs, spans=spans, finish=finish)
        )

    assert sent("r0") == ""
    handed_back("migrated", 4, 5)
    assert sent("r1") == "r0"
    handed_back("refused")
    assert sent("r2") == "r0"  # r1 has made nothing
    handed_back("migrated", 6)
    assert sent("r2") == ""
    handed_back("abort")
    assert sent("r0") == "r2"
