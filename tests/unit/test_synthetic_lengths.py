"""Lengths that are drawn: the same for a sample wherever and however often it is taken up, long-tailed, cut."""

from __future__ import annotations

import statistics

import pytest
from omegaconf import OmegaConf

from psrl.config.checks import check
from psrl.config.compose import compose_config
from psrl.config.errors import ConfigError
from psrl.protocol.control import Assignment
from psrl.protocol.generation import FINISH_ABORT, FINISH_LENGTH, SamplingParams, TokenChunk
from psrl.protocol.samples import VersionSpan
from psrl.rollout.group_work import GroupWork, sample_seed
from psrl.tasks.synthetic_lengths import drawn_length, response_budget

pytestmark = pytest.mark.unit

DRAWN = ["data.synthetic_lengths.mean_tokens=100", "data.max_response_length=1000"]
IGNORE_EOS = "gen_actor_rollout_ref.rollout.ignore_eos=True"


def composed(*overrides: str):
    return OmegaConf.to_object(compose_config(["preset=laptop", "task=chain_sum", *overrides]))


def test_lengths_have_the_mean_the_tail_and_the_cut_that_was_asked_for() -> None:
    lengths = sorted(drawn_length(seed, mean=1000, sigma=1.0, most=8000) for seed in range(20_000))
    assert statistics.fmean(lengths) == pytest.approx(970, rel=0.05), (
        "a little below 1000: the cut takes the tail's end"
    )
    assert lengths[len(lengths) // 2] == pytest.approx(1000 * 2.71828**-0.5, rel=0.05)
    assert lengths[-1] == 8000 and lengths[0] >= 1


def test_a_response_ends_at_its_length_over_all_its_parts() -> None:
    budget = response_budget(composed(*DRAWN, IGNORE_EOS))
    assignment = Assignment(group=0, data_epoch=0, prompt=3, n=4, version=0, incarnation=0, instance="i")
    work = GroupWork(assignment, [1, 2], SamplingParams(ignore_eos=True), budget, seed=7)
    wanted = [budget(sample_seed(7, assignment, i)) for i in range(4)]
    request = work.request("i", range(4))
    assert request is not None and [s.max_new_tokens for s in request.samples] == wanted and len(set(wanted)) > 1

    def chunk(tokens: int, finish: str) -> TokenChunk:
        spans = [VersionSpan(0, tokens, 0)]
        return TokenChunk(
            group=0, sample=0, token_ids=[5] * tokens, logprobs=[0.0] * tokens, spans=spans, finish=finish
        )

    assert work.add(chunk(wanted[0] - 1, FINISH_ABORT), "i") == (True, True)
    again = work.request("j", [0])
    assert again is not None and again.samples[0].max_new_tokens == 1
    work.add(chunk(1, FINISH_LENGTH), "j")
    assert work.samples[0].finish == FINISH_LENGTH


def test_refusals_and_default() -> None:
    assert response_budget(composed())(5) == 8
    with pytest.raises(ConfigError, match=r"ignore_eos=True"):
        check(composed(*DRAWN))
    with pytest.raises(ConfigError, match=r"synthetic_lengths\.mean_tokens=0 with"):
        check(composed("data.synthetic_lengths.mean_tokens=0", IGNORE_EOS))
    assert check(composed(*DRAWN, IGNORE_EOS)) == []
