"""A group whose samples are multi-turn trajectories: who is where, which of them are over, what to seal. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from psrl.agents.base import Ending
from psrl.protocol.control import Assignment
from psrl.protocol.generation import FINISH_LENGTH, FINISH_STOP, GenerateRequest, SamplingParams, TokenChunk
from psrl.protocol.samples import Group, Sample
from psrl.rollout.group_work import GroupWork, Scored
from psrl.rollout.score_result import ScoreResult
from psrl.rollout.score_worker import INVALID, OK
from psrl.rollout.trajectory import Places, TokenLimits, Trajectory
from psrl.sessions.turns import TrainingArrays, shared_prompt


@dataclass(frozen=True, slots=True)
class Captured:
    """What was captured of a sample's session: the branch that trains, and its last answer."""

    arrays: TrainingArrays
    answer_ids: Sequence[int]
    num_turns: int


class NoCommonPromptError(ValueError):
    """The sessions of one group do not even begin with the same token."""


class SessionGroup(GroupWork):
    """`captured` is asked once a trajectory has ended. The sealed prompt of the group is what its trajectories begin with
    alike; whatever else an agent said before the model did counts as response that does not train."""

    def __init__(
        self,
        assignment: Assignment,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        limits: TokenLimits,
        seed: int,
        *,
        places: Callable[[SessionGroup], Places],
        captured: Callable[[int], Captured | None],
        greedy: int = 0,
    ) -> None:
        super().__init__(assignment, prompt_ids, sampling, limits.response, seed, greedy=greedy)
        mine = places(self)
        self.trajectories = [
            Trajectory(s.sample, s.seed, assignment.n, limits, mine, greedy=s.greedy) for s in self.samples
        ]
        self.samples = self.trajectories  # type: ignore[assignment]  # they answer what a group asks of its samples
        self.captured = captured
        self.endings: dict[int, Ending] = {}
        self.ended_turns: list[tuple[int, str, int]] = []
        """(sample, instance, tokens of the conversation) of turns that have ended since this was last emptied."""
        self._captured: dict[int, Captured] = {}
        self._sealed: dict[int, TrainingArrays] | None = None

    def requests(self, instance: str, samples: Sequence[int]) -> list[GenerateRequest]:
        asked = [
            self.trajectories[i].next_request(
                instance,
                group=self.assignment.group,
                version=self.assignment.version,
                incarnation=self.incarnation,
                sampling=self.sampling,
            )
            for i in samples
        ]
        return [request for request in asked if request is not None]

    def sample_of(self, chunk: TokenChunk) -> int:
        return chunk.sample % self.assignment.n

    def add(self, chunk: TokenChunk, instance: str) -> tuple[bool, bool]:
        sample = self.sample_of(chunk)
        trajectory = self.trajectories[sample]
        left, route = trajectory.add(chunk, instance)
        if left and not route:
            self.ended_turns.append((sample, instance, trajectory.longest))
        return left, route

    def response_tokens(self, sample: int) -> int:
        return max(0, self.trajectories[sample].turn_tokens - len(self.prompt_ids))

    def context(self, sample: int) -> Sequence[int]:
        return self.trajectories[sample].turn_ids

    def finish(self, sample: int, ending: Ending) -> None:
        """A trajectory is over."""
        trajectory = self.trajectories[sample]
        if not trajectory.finish:
            trajectory.end(FINISH_LENGTH if trajectory.last_finish == FINISH_LENGTH else FINISH_STOP)
            self.endings[sample] = ending
            if (had := self.captured(sample)) is not None:
                self._captured[sample] = had
                written = zip(had.arrays.response_ids, had.arrays.response_mask, strict=True)
                trajectory.token_ids = [token for token, by_model in written if by_model]
            self._note_end(sample)

    def fault(self) -> str:
        try:
            self._arrays()
        except NoCommonPromptError as error:
            return str(error)
        return ""

    @property
    def failed(self) -> list[str]:
        """Why each of the kept trajectories that failed did."""
        return [why for i in self.kept() if (why := self._failure(i))]

    def verdict(self, sample: int) -> ScoreResult | None:
        """What a trajectory is worth as its agent says; None: its last message is to be scored by the task."""
        if failure := self._failure(sample):
            return ScoreResult(None, INVALID, failure)
        ending = self.endings[sample]
        return None if ending.reward is None else ScoreResult(ending.reward, OK, None, self._metrics(sample))

    def answer_ids(self, sample: int) -> Sequence[int]:
        had = self._captured.get(sample)
        return had.answer_ids if had is not None else []

    def group(self, scores: Sequence[Scored]) -> Group:
        arrays = self._arrays()
        return self._group(
            [
                Sample(
                    response_ids=np.asarray(arrays[i].response_ids, dtype="<i4").tobytes(),
                    logprobs=np.asarray(arrays[i].rollout_log_probs, dtype="<f4").tobytes(),
                    reward=score.reward,
                    finish=self.trajectories[i].finish,
                    spans=arrays[i].spans,
                    mask=bytes(arrays[i].response_mask),
                    metrics=self._metrics(i) | dict(score.metrics),
                    greedy=self.trajectories[i].greedy,
                )
                for i, score in zip(self.kept(), scores, strict=True)
            ]
        )

    def trainable_tokens(self, scores: Sequence[Scored]) -> list[int]:
        arrays = self._arrays()
        return [
            len(self.prompt_ids) + len(arrays[i].response_ids)
            if score.reward is not None and any(arrays[i].response_mask) and not self.trajectories[i].greedy
            else 0
            for i, score in zip(self.kept(), scores, strict=True)
        ]

    def _failure(self, sample: int) -> str:
        """Why a kept trajectory cannot be trained; "" if it can. One that was cut short has no ending, hence no reward."""
        ending = self.endings.get(sample)
        return ending.failed if ending is not None else "it was ended before it was over"

    def _metrics(self, sample: int) -> dict[str, float]:
        ending, had = self.endings.get(sample), self._captured.get(sample)
        turns = {"num_turns": float(had.num_turns if had is not None else 0)}
        return turns | (ending.metrics if ending is not None else {})

    def _arrays(self) -> dict[int, TrainingArrays]:
        """Of each kept sample; their common beginning becomes the group's prompt. One without a turn has no response."""
        if self._sealed is None:
            had = {i: c.arrays for i in self.kept() if (c := self._captured.get(i)) is not None and c.arrays.prompt_ids}
            shared = dict(zip(had, shared_prompt(list(had.values())), strict=True)) if had else {}
            common = next(iter(shared.values())).prompt_ids if shared else list(self.prompt_ids)
            if not common:
                raise NoCommonPromptError(
                    f"the sessions of group {self.assignment.group} begin with different tokens: they have no prompt in common"
                )
            self.prompt_ids = tuple(common)
            nothing = TrainingArrays(common, [], [], [], [])
            self._sealed = {i: shared.get(i, nothing) for i in self.kept()}
        return self._sealed
