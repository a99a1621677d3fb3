"""One validator's part of a validation: which requests to make, when all are answered, what they are worth. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from psrl.protocol.generation import FINISH_LENGTH, GenerateRequest, SampleRequest, SamplingParams, TokenChunk
from psrl.protocol.validation import SourceScores, Validate
from psrl.tasks.base import Answer, PreparedPrompt


class Rewarded(Protocol):
    """What scoring says of one sample; `reward` is None when there is none."""

    reward: float | None


class Prompts(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> PreparedPrompt: ...


class ValidationWork:
    """`samples` answers to each prompt of one order; a prompt's index is its group for the engine."""

    def __init__(
        self, order: Validate, prompts: Prompts, sampling: SamplingParams, *, samples: int, max_response: int, seed: int
    ) -> None:
        self.order = order
        self._prompts = {i: prompts[i] for i in range(order.part, len(prompts), order.parts)}
        self._sampling, self._max_response, self._seed = sampling, max_response, seed
        self._tokens: dict[int, list[list[int]]] = {i: [[] for _ in range(samples)] for i in self._prompts}
        self._finish: dict[int, list[str]] = {i: [""] * samples for i in self._prompts}
        self._unfinished = samples * len(self._prompts)

    @property
    def complete(self) -> bool:
        return not self._unfinished

    def requests(self) -> Iterator[GenerateRequest]:
        for index, prompt in self._prompts.items():
            yield GenerateRequest(
                group=index,
                min_version=self.order.version,
                incarnation=self.order.incarnation,
                prompt_ids=tuple(np.frombuffer(prompt.prompt_ids, dtype="<i4").tolist()),
                sampling=self._sampling,
                samples=tuple(
                    SampleRequest(
                        sample=i,
                        max_new_tokens=self._max_response,
                        seed=validation_seed(self._seed, index, i),
                        exact=True,
                    )
                    for i in range(len(self._tokens[index]))
                ),
            )

    def add(self, chunk: TokenChunk) -> None:
        self._tokens[chunk.group][chunk.sample] += chunk.token_ids
        if chunk.finish:
            self._finish[chunk.group][chunk.sample] = chunk.finish
            self._unfinished -= 1

    def answers(self, decode: Callable[[Sequence[int]], str]) -> list[list[Answer]]:
        """The answers to each prompt."""
        return [
            [
                Answer(
                    solution_str=decode(tokens),
                    data_source=prompt.data_source,
                    ground_truth=prompt.ground_truth,
                    extra_info=prompt.extra_info,
                )
                for tokens in self._tokens[index]
            ]
            for index, prompt in self._prompts.items()
        ]

    def scores(self, results: Sequence[Sequence[Rewarded]]) -> Mapping[str, SourceScores]:
        """Sums by data source; `results` are those of `answers`, in its order."""
        found: dict[str, SourceScores] = {}
        for (index, prompt), of_prompt in zip(self._prompts.items(), results, strict=True):
            scores = found.setdefault(prompt.data_source, SourceScores())
            for sample, result in enumerate(of_prompt):
                scores.samples += 1
                scores.failed += result.reward is None
                scores.reward_sum += result.reward or 0.0
                scores.response_tokens += len(self._tokens[index][sample])
                scores.cut_off += self._finish[index][sample] == FINISH_LENGTH
        return found


def validation_seed(seed: int, prompt: int, sample: int) -> int:
    """62 bits that depend on run seed, prompt and sample only: every version draws the same numbers, so that two
    versions differ by their weights and not by luck."""
    return int(np.random.SeedSequence([seed & 0xFFFFFFFF, prompt, sample]).generate_state(1, np.uint64)[0]) >> 2
