"""One group in an agent loop's hands: which samples are where, what to ask next, what to seal. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from psrl.protocol.control import Assignment
from psrl.protocol.generation import GenerateRequest, SamplingParams, TokenChunk
from psrl.protocol.samples import Group, Sample
from psrl.rollout.partial import PartialSample


class Scored(Protocol):
    """What scoring says of one sample; `reward` is None when there is none."""

    reward: float | None


class GroupWork:
    """The samples of one assignment from first token to sealed group."""

    def __init__(
        self,
        assignment: Assignment,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        max_response: int,
        seed: int,
        greedy: int = 0,
    ) -> None:
        """The last `greedy` samples are made without randomness."""
        self.assignment = assignment
        self.prompt_ids = tuple(prompt_ids)
        self.sampling = sampling
        self.incarnation = assignment.incarnation
        self.samples = [
            PartialSample(
                sample=i,
                seed=sample_seed(seed, assignment, i),
                max_response=max_response,
                greedy=i >= assignment.n - greedy,
            )
            for i in range(assignment.n)
        ]
        self.unfinished = len(self.samples)

    def request(self, instance: str, samples: Sequence[int]) -> GenerateRequest | None:
        """Ask `instance` to make or go on with these samples; None when every one of them has used up its budget."""
        wanted = [r for i in samples if not self.samples[i].finish and (r := self._next(i, instance))]
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

    def _next(self, sample: int, instance: str):
        request = self.samples[sample].next_request(instance)
        self.unfinished -= request is None
        return request

    def add(self, chunk: TokenChunk, instance: str) -> tuple[bool, bool]:
        """(left, route): did the sample leave `instance`, and must it be routed again? A chunk from an instance that
        the sample is no longer at is ignored."""
        sample = self.samples[chunk.sample]
        if sample.finish or sample.instance != instance or not sample.add(chunk):
            return False, False
        self.unfinished -= bool(sample.finish)
        return True, not sample.finish

    def lost(self, instance: str) -> list[int]:
        """`instance` is gone: the samples that must be routed again."""
        lost = [s for s in self.samples if s.instance == instance and not s.finish]
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
        return [s.sample for s in self.samples if not s.instance and not s.finish]

    def group(self, scores: Sequence[Scored]) -> Group:
        """The finished group, ready to be sealed."""
        return Group(
            group=self.assignment.group,
            data_epoch=self.assignment.data_epoch,
            prompt=self.assignment.prompt,
            version=self.assignment.version,
            prompt_ids=np.asarray(self.prompt_ids, dtype="<i4").tobytes(),
            samples=[
                Sample(
                    response_ids=np.asarray(s.token_ids, dtype="<i4").tobytes(),
                    logprobs=np.asarray(s.logprobs, dtype="<f4").tobytes(),
                    reward=score.reward,
                    finish=s.finish,
                    spans=s.spans,
                    greedy=s.greedy,
                )
                for s, score in zip(self.samples, scores, strict=True)
            ],
        )

    def trainable_tokens(self, scores: Sequence[Scored]) -> list[int]:
        """Prompt + response tokens of each sample; 0 for one that may not be trained (no reward, empty response, greedy)."""
        return [
            len(self.prompt_ids) + len(s.token_ids) if score.reward is not None and s.token_ids and not s.greedy else 0
            for s, score in zip(self.samples, scores, strict=True)
        ]


def sample_seed(seed: int, assignment: Assignment, sample: int) -> int:
    """A 62-bit seed that depends on run seed, prompt, pass over the data and sample only: the same prompt in the same
    pass draws the same numbers wherever and whenever it is generated."""
    value = (seed * 1_000_003 + assignment.data_epoch) * 1_000_003 + assignment.prompt
    value = (value * 1_009 + sample) & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 2
