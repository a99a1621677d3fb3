"""Captured turns as one training sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from psrl.protocol.samples import VersionSpan
from psrl.sessions.turns import TrainingArrays


class CapturedTurn(NamedTuple):
    """One turn of a branch: the tokens that led to it since the turn before (the first one's: its prompt), and the model's."""

    added_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[VersionSpan]
    """Positions count from the first token of the turn."""


def training_arrays(turns: Sequence[CapturedTurn]) -> TrainingArrays:
    """The branch that consists of `turns`: the prompt of the first, then everything after it, masked where the model did not
    write it. Spans that touch under one version become one, so a turn boundary leaves no trace in them but its gap.

    >>> first = CapturedTurn([1, 2], [3, 4], [-0.5, -0.25], [VersionSpan(0, 2, 7)])
    >>> second = CapturedTurn([5], [6], [-0.125], [VersionSpan(0, 1, 8)])
    >>> training_arrays([first, second])
    TrainingArrays(prompt_ids=[1, 2], response_ids=[3, 4, 5, 6], response_mask=[1, 1, 0, 1], \
rollout_log_probs=[-0.5, -0.25, 0.0, -0.125], spans=[VersionSpan(start=0, end=2, version=7), \
VersionSpan(start=3, end=4, version=8)])
    """
    sample = TrainingArrays(list(turns[0].added_ids), [], [], [], [])
    for i, turn in enumerate(turns):
        glue = list(turn.added_ids) if i else []
        sample.response_ids += [*glue, *turn.token_ids]
        sample.response_mask += [0] * len(glue) + [1] * len(turn.token_ids)
        sample.rollout_log_probs += [0.0] * len(glue) + list(turn.logprobs)
        begin = len(sample.response_ids) - len(turn.token_ids)
        for span in turn.spans:
            _append(sample.spans, VersionSpan(begin + span.start, begin + span.end, span.version))
    return sample


def _append(spans: list[VersionSpan], span: VersionSpan) -> None:
    if spans and (spans[-1].end, spans[-1].version) == (span.start, span.version):
        span = VersionSpan(spans.pop().start, span.end, span.version)
    if span.end > span.start:
        spans.append(span)
