"""From a complete group to sealed samples on disk, or to the reason why it cannot train."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from psrl.config.algorithm_checks import least_valid_samples
from psrl.config.schema import Config
from psrl.models.tokenizer import ChatTokenizer
from psrl.protocol.control import GroupDone, GroupFailed
from psrl.protocol.generation import FINISH_TRUNCATED
from psrl.protocol.samples import SampleRef
from psrl.rollout.group_filters import Filter, make_filter
from psrl.rollout.group_work import GroupWork
from psrl.rollout.sample_ends import FILTERED
from psrl.rollout.scoring import ScoreResult, ScoringPool
from psrl.rundir.layout import RunDir
from psrl.rundir.segments import SegmentWriter
from psrl.tasks.base import Answer
from psrl.tasks.prepared import PreparedReader

LEAST_TRAINABLE = 2
"""Samples of a group that must be trainable, where they are compared with each other."""


def failure(
    work: GroupWork,
    results: Sequence[ScoreResult],
    worthless: Filter | None = None,
    least_trainable: int = LEAST_TRAINABLE,
) -> GroupFailed | None:
    """Why this scored group cannot train, or (as `worthless` says) is not worth it; None: it will.

    A failed score is tried again with its whole group. A group that was cut short before it had two samples with a token
    is dropped as an empty truncation. A greedy sample is the baseline of the others: without its reward they have none."""
    group = work.assignment.group
    if failed := next((r for r in results if r.kind in ("error", "timeout")), None):
        return GroupFailed(group=group, reason=failed.kind, detail=failed.error or "", retry=True)
    trainable = [r for r, tokens in zip(results, work.trainable_tokens(results), strict=True) if tokens]
    lacks_baseline = any(r.reward is None and work.samples[i].greedy for r, i in zip(results, work.kept(), strict=True))
    if len(trainable) < least_trainable and work.failed:
        return GroupFailed(group=group, reason="error", detail=work.failed[0], retry=True)
    if len(trainable) < least_trainable or lacks_baseline:
        cut = any(work.samples[i].finish == FINISH_TRUNCATED for i in work.kept())
        reason = "empty_truncation" if cut else "invalid_rewards"
        detail = f"{len(trainable)} of {len(results)} samples have a reward and a token that trains"
        detail += ", the greedy one has no reward" * lacks_baseline
        return GroupFailed(group=group, reason=reason, detail=detail, retry=False)
    if worthless is not None and (why := worthless(trainable)):
        return GroupFailed(group=group, reason=FILTERED, detail=why, retry=False)
    return None


class Finisher:
    """Scores groups in the processes of a ScoringPool and appends them to this agent loop's segments."""

    def __init__(
        self, config: Config, run_dir: RunDir, name: str, prompts: PreparedReader, tokenizer: ChatTokenizer
    ) -> None:
        asked, metric = config.psrl.group_post_process, config.algorithm.filter_groups.metric
        self.worthless = make_filter(asked.name, metric) if asked.enable else None
        self.least_trainable = least_valid_samples(config.algorithm.adv_estimator)
        self.prompts, self.tokenizer = prompts, tokenizer
        self.pool = ScoringPool.from_config(config)
        self.writer = SegmentWriter(run_dir.samples, name)
        self.segment_version = -1
        self._encode = msgspec.msgpack.Encoder().encode

    async def score(self, work: GroupWork) -> list[ScoreResult] | GroupFailed:
        """Reward the kept samples; a failure is reported, never trained as reward 0.

        Raises RewardTypeError or MissingMetricError for a reward function that is wrong."""
        if fault := work.fault():
            return GroupFailed(group=work.assignment.group, reason="error", detail=fault, retry=False)
        prompt = self.prompts[work.assignment.prompt]
        verdicts = {i: work.verdict(i) for i in work.kept()}
        open_ones = [i for i, verdict in verdicts.items() if verdict is None]
        answers = [
            Answer(
                solution_str=self.tokenizer.decode(work.answer_ids(i)),
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
            )
            for i in open_ones
        ]
        verdicts |= zip(open_ones, await self.pool.score(answers) if answers else [], strict=True)
        results = [verdict for verdict in verdicts.values() if verdict is not None]
        return failure(work, results, self.worthless, self.least_trainable) or results

    async def seal(self, batch: Sequence[tuple[GroupWork, list[ScoreResult]]]) -> list[GroupDone]:
        """Append these groups, one fsync for all; they are on disk when it returns."""
        newest = max(work.assignment.version for work, _ in batch)
        if newest > self.segment_version:  # one segment a step, so that old ones can be deleted whole
            self.segment_version = newest
            self.writer.rotate()
        sealed = [self._append(work, results) for work, results in batch]
        await asyncio.to_thread(self.writer.sync)
        return sealed

    def _append(self, work: GroupWork, results: Sequence[ScoreResult]) -> GroupDone:
        segment, offset, length, crc = self.writer.append(self._encode(work.group(results)))
        rewards = [
            r.reward
            for r, i in zip(results, work.kept(), strict=True)
            if r.reward is not None and not work.samples[i].greedy
        ]
        return GroupDone(
            group=work.assignment.group,
            ref=SampleRef(segment, offset, length, crc, work.trainable_tokens(results), len(work.prompt_ids)),
            reward_mean=sum(rewards) / len(rewards),
            response_tokens=sum(len(work.samples[i].token_ids) for i in work.kept()),
        )
