"""One group in an agent loop's hands: which samples are where, what to ask next, what to seal. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from psrl.protocol.control import Assignment
from psrl.protocol.generation import FINISH_TRUNCATED, GenerateRequest, SamplingParams, TokenChunk
from psrl.protocol.samples import Group, Sample
from psrl.rollout.partial import PartialSample
from psrl.rollout.score_result import ScoreResult


class Scored(Protocol):
    """What scoring says of one sample; `reward` is None when there is none."""

    reward: float | None
    metrics: dict[str, float]


class GroupWork:
    """The samples of one assignment from first token to sealed group.

    With `interrupt_as_prompt` only the tokens after a sample's last interruption train (mask 1): those before it were
    made by weights that have since been replaced, and count as prompt. The reward is that of the whole response.
    """

    def __init__(
        self,
        assignment: Assignment,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        max_response: int | Callable[[int], int],
        seed: int,
        *,
        greedy: int = 0,
        interrupt_as_prompt: bool = False,
    ) -> None:
        """`max_response`: most tokens of a response, or those of a sample by its seed. The last `greedy` samples are made without
        randomness."""
        budget = max_response if callable(max_response) else lambda _: max_response
        seeds = [sample_seed(seed, assignment, i) for i in range(assignment.n)]
        self.assignment = assignment
        self.prompt_ids = tuple(prompt_ids)
        self.sampling = sampling
        self.incarnation = assignment.incarnation
        self.samples = [
            PartialSample(
                sample=i,
                seed=seeds[i],
                max_response=budget(seeds[i]),
                greedy=i >= assignment.n - greedy,
            )
            for i in range(assignment.n)
        ]
        self.num_kept = assignment.keep or assignment.n
        self.unfinished = len(self.samples)
        self.interrupt_as_prompt = interrupt_as_prompt
        self._ended: list[int] = []
        """Samples in the order in which they finished."""

    def request(self, instance: str, samples: Sequence[int]) -> GenerateRequest | None:
        """Ask `instance` to make or go on with these samples; None when every one of them has used up its budget. One that
        has ended or is being made somewhere else, because two answers crossed, is left out."""
        wanted = [r for i in samples if self.samples[i].looking and (r := self._next(i, instance))]
        if not wanted:
            return None
        return GenerateRequest(
            group=self.assignment.group,
            min_version=self.assignment.version,
            incarnation=self.incarnation,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            samples=tuple(wanted),
        )

    def requests(self, instance: str, samples: Sequence[int]) -> list[GenerateRequest]:
        """The same as a list: one for all of them, or none."""
        request = self.request(instance, samples)
        return [] if request is None else [request]

    def _next(self, sample: int, instance: str):
        request = self.samples[sample].next_request(instance)
        if request is None:
            self._note_end(sample)
        return request

    def _note_end(self, sample: int) -> None:
        self.unfinished -= 1
        self._ended.append(sample)

    def sample_of(self, chunk: TokenChunk) -> int:
        """The sample that a chunk belongs to."""
        return chunk.sample

    def add(self, chunk: TokenChunk, instance: str) -> tuple[bool, bool]:
        """(left, route): did the sample leave `instance`, and must it be routed again? A chunk from an instance that
        the sample is no longer at is ignored."""
        sample = self.samples[chunk.sample]
        if sample.finish or sample.instance != instance or not sample.add(chunk):
            return False, False
        if sample.finish:
            self._note_end(sample.sample)
        return True, not sample.finish

    @property
    def complete(self) -> bool:
        """Enough samples have finished, those without a single token not counted, or there is nothing to wait for."""
        return not self.unfinished or sum(bool(self.samples[i].token_ids) for i in self._ended) >= self.num_kept

    def end_rest(self, finish: str) -> dict[str, int]:
        """End all samples that have not finished, as they are; where they were, as `where`. Whatever still comes of them
        is ignored."""
        were = self.where()
        for sample in self.samples:
            if not sample.finish:
                sample.end(finish)
                if finish == FINISH_TRUNCATED:
                    self._ended.append(sample.sample)
        self.unfinished = 0
        return were

    def kept(self) -> list[int]:
        """The samples that count, in their own order: the first that finished, then the longest of those cut short; one
        without a token only for want of others. `num_kept` of them once the group is complete."""

        def rank(i: int) -> tuple[bool, bool, int]:
            tokens, cut = len(self.samples[i].token_ids), self.samples[i].finish == FINISH_TRUNCATED
            return tokens == 0, cut, -tokens if cut else 0

        return sorted(sorted(self._ended, key=rank)[: self.num_kept])

    def lost(self, instance: str) -> list[int]:
        """`instance` is gone: the samples that must be routed again."""
        lost = [s for s in self.samples if s.instance == instance and not s.finish]
        for sample in self.samples:
            sample.forget(instance)
        for sample in lost:
            sample.lost()
        return [s.sample for s in lost]

    def where(self) -> dict[str, int]:
        """Samples at each instance now."""
        counts: dict[str, int] = {}
        for sample in self.samples:
            if sample.instance:
                counts[sample.instance] = counts.get(sample.instance, 0) + 1
        return counts

    def looking(self) -> list[int]:
        """Samples that wait for an instance."""
        return [s.sample for s in self.samples if s.looking]

    def response_tokens(self, sample: int) -> int:
        """Tokens of a sample after the group's prompt so far."""
        return len(self.samples[sample].token_ids)

    def context(self, sample: int) -> Sequence[int]:
        """All tokens of a sample so far, the prompt's first."""
        return (*self.prompt_ids, *self.samples[sample].token_ids)

    def verdict(self, sample: int) -> ScoreResult | None:
        """What is known of a kept sample's reward; None: its answer is to be scored."""
        return None

    def answer_ids(self, sample: int) -> Sequence[int]:
        """The tokens that are scored."""
        return self.samples[sample].token_ids

    def fault(self) -> str:
        """Why a complete group cannot be sealed as one; "" if it can."""
        return ""

    @property
    def failed(self) -> list[str]:
        """Why kept samples failed before they could be scored."""
        return []

    def group(self, scores: Sequence[Scored]) -> Group:
        """The finished group, ready to be sealed; `scores` are those of the samples `kept`."""
        return self._group(
            [
                Sample(
                    response_ids=np.asarray(s.token_ids, dtype="<i4").tobytes(),
                    logprobs=np.asarray(s.logprobs, dtype="<f4").tobytes(),
                    reward=score.reward,
                    finish=s.finish,
                    spans=s.spans,
                    mask=self._mask(s),
                    metrics=dict(score.metrics),
                    greedy=s.greedy,
                )
                for s, score in zip(self._kept_samples(), scores, strict=True)
            ]
        )

    def _group(self, samples: list[Sample]) -> Group:
        return Group(
            group=self.assignment.group,
            data_epoch=self.assignment.data_epoch,
            prompt=self.assignment.prompt,
            version=self.assignment.version,
            prompt_ids=np.asarray(self.prompt_ids, dtype="<i4").tobytes(),
            samples=samples,
        )

    def trainable_tokens(self, scores: Sequence[Scored]) -> list[int]:
        """Prompt + response tokens of each kept sample; 0 for one that may not be trained (no reward, no token that
        trains, greedy)."""
        return [
            len(self.prompt_ids) + len(s.token_ids) if score.reward is not None and self._num_trainable(s) else 0
            for s, score in zip(self._kept_samples(), scores, strict=True)
        ]

    def _kept_samples(self) -> list[PartialSample]:
        return [self.samples[i] for i in self.kept()]

    def _num_trainable(self, sample: PartialSample) -> int:
        if sample.greedy:
            return 0
        return len(sample.token_ids) - (sample.newest_start if self.interrupt_as_prompt else 0)

    def _mask(self, sample: PartialSample) -> bytes:
        """Empty (all tokens train) unless some count as prompt."""
        trained = self._num_trainable(sample)
        as_prompt = len(sample.token_ids) - trained
        return b"\x00" * as_prompt + b"\x01" * trained if as_prompt else b""


def sample_seed(seed: int, assignment: Assignment, sample: int) -> int:
    """A 62-bit seed that depends on run seed, prompt, pass over the data and sample only: the same prompt in the same
    pass draws the same numbers wherever and whenever it is generated."""
    value = (seed * 1_000_003 + assignment.data_epoch) * 1_000_003 + assignment.prompt
    value = (value * 1_009 + sample) & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 2
